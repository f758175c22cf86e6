"""`Mover`: what moves a worker's blocks between the store and its GPU, and where it gets that."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np

from kvstore.client import Match, Space
from kvstore.client.gpu import Calibration, Device, EngineSide, Event, GpuSide, Taker, external
from kvstore.engines.torch_streams import device_uuid
from kvstore.engines.vllm.device_pages import DeviceGroups, OpaqueMemory
from kvstore.engines.vllm.messages import LoadJob

LOAD_STAGE_BYTES = 96 << 20  # two halves of 32 MiB for loads; the rest is nobody's
STAGE_ALIGN = 128


class Ground(Protocol):
    """A worker's GPU: its driver, the stream that its model computes on, memory on it."""

    device: Device

    def stream(self) -> int:
        """Handle of the stream that the model's work is asked of at this moment."""
        ...

    def memory(self, rows: int, columns: int) -> Any:
        """A new tensor of bytes on the GPU, of any content."""
        ...


class TorchGround:
    """The GPU that torch's `device` is. Raises CudaUnavailable where the driver has none such."""

    def __init__(self, device: Any) -> None:
        self._place = device
        self.device = Device(device_uuid(device))

    def stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self._place).cuda_stream)

    def memory(self, rows: int, columns: int) -> Any:
        import torch

        return torch.empty((rows, columns), dtype=torch.uint8, device=self._place)


class Mover:
    """Loads into a worker's pages, and saves out of them that the engine does not wait for.

    `save_bytes` of the GPU's memory are for blocks on their way to the store; loads of short
    pieces have a stage of their own. What the GPU or torch fail with goes through.
    """

    def __init__(self, ground: Ground, groups: DeviceGroups, save_bytes: int) -> None:
        self._ground, self.groups = ground, groups
        self._engines: dict[Space, EngineSide] = {}
        self._lock = threading.Lock()
        self.gpu = GpuSide(ground.device)
        try:
            self._memory = OpaqueMemory(groups, self._load_stage())
            self.taker = self._taker(save_bytes)
        except BaseException:
            self.gpu.close()
            raise

    def _load_stage(self) -> Any:
        """None where pieces are long enough to be copied one by one."""
        if Calibration().copies_pieces(self.groups.run_bytes):
            return None
        return self._stage(max(3, LOAD_STAGE_BYTES // self.groups.block_bytes))

    def _stage(self, slots: int) -> Any:
        stride = -(-self.groups.block_bytes // STAGE_ALIGN) * STAGE_ALIGN
        return self._ground.memory(slots, stride)

    def _taker(self, save_bytes: int) -> Taker | None:
        slots = save_bytes // self.groups.block_bytes
        return Taker(self.gpu, OpaqueMemory(self.groups, self._stage(slots))) if slots else None

    @property
    def has_load_stage(self) -> bool:
        """Whether loads may go through a stage; else they go by pieces."""
        return self._memory.stage is not None

    def stream(self) -> int:
        return self._ground.stream()

    def mark(self) -> Event:
        """A timed event after all that the engine has asked of its stream; raises CudaError."""
        return external(self._ground.device, self.stream()).record(timing=True)

    def rows(self, job: LoadJob, match: Match) -> np.ndarray:
        """A job's blocks as rows of the match's; what that has beyond them goes nowhere."""
        rows = self.groups.rows(job.block_ids, job.count)[: match.block_count]
        beyond = np.zeros((match.block_count - len(rows), rows.shape[1]), np.int32)
        return np.concatenate([rows, beyond])

    def engine(self, space: Space) -> EngineSide:
        """Loads from this space. Raises StoreUnavailable when the GPU fails."""
        with self._lock:
            engine = self._engines.get(space)
            if engine is None:
                engine = self.gpu.engine(space, self._memory, Calibration())
                self._engines[space] = engine
            return engine

    def forget(self) -> list[EngineSide]:
        """Leaves all spaces so far to the caller, who has them dropped."""
        with self._lock:
            engines, self._engines = list(self._engines.values()), {}
            return engines

    def drop(self, engines: list[EngineSide]) -> None:
        """Closes what `forget` gave, once its copies are over; its loads under way are no use."""
        for engine in engines:
            self.gpu.drop(engine)

    def close(self) -> None:
        """Waits for all copies."""
        if self.taker is not None:
            self.taker.close()
        self.gpu.close()
