"""`Taker`: saves of blocks that the engine may use for something else after this step.

    engine's stream ──event──► gather into slots of a stage ──event──► engine's stream goes on
                                        └──event──► slots to staging, as a put asks for them

The engine's later work waits on the GPU for the gather, which takes a thousandth of what the link
to host memory takes; the processor waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from kvstore.client.gpu.calibration import Calibration
from kvstore.client.gpu.engine import GpuSide
from kvstore.client.gpu.loading import external, failed
from kvstore.client.gpu.memory import EngineMemory, Parts, Stage
from kvstore.client.gpu.ring import Ring
from kvstore.client.gpu.saving import SavedBlocks, Saver, registered_staging
from kvstore.client.space import Space
from kvstore.cuda.device import Event, Stream
from kvstore.cuda.driver import CudaError


class Slots:
    """A stage's slots as an engine's memory: a page is a slot, a block one piece."""

    layer_count = 1
    stage: Stage | None = None

    def __init__(self, stage: Stage, block_bytes: int) -> None:
        self._stage, self.layer_bytes = stage, block_bytes

    def parts(self, pages: np.ndarray, layers: range) -> Parts:
        begins = np.uint64(self._stage.address) + pages.astype(np.uint64) * np.uint64(
            self._stage.stride
        )
        return Parts(begins.reshape(-1, 1), np.zeros(1, np.uint64), self.layer_bytes)

    def scatter(self, slots: np.ndarray, pages: np.ndarray, layers: range, stream: Stream) -> None:
        raise AssertionError("slots are one piece each")

    def gather(self, pages: np.ndarray, slots: np.ndarray, stream: Stream) -> None:
        raise AssertionError("slots are one piece each")


class Taken:
    """Blocks that lie in slots of a stage, until `release`; `end` is when they do."""

    def __init__(self, slots: np.ndarray, end: Event, give_back: Callable[[np.ndarray], None]):
        self.slots, self.end = slots, end
        self._give_back = give_back

    def __len__(self) -> int:
        return len(self.slots)

    def release(self) -> None:
        """The slots are free again. No put of these blocks may run; idempotent."""
        slots, self.slots = self.slots, self.slots[:0]
        if len(slots):
            self._give_back(slots)


class Taker:
    """Copies blocks aside at the end of a step, and to host memory later.

    All slots of the memory's stage are its own; what finds none is not taken. `take` is for the
    thread that asks the engine's work of the GPU, `source` for any other.
    """

    def __init__(self, gpu: GpuSide, memory: EngineMemory) -> None:
        assert memory.stage is not None, "blocks are taken into a stage"
        self._gpu, self._memory = gpu, memory
        self.block_bytes = memory.layer_count * memory.layer_bytes
        self._free = list(range(memory.stage.slots))
        self._lock, self._saving = threading.Lock(), threading.Lock()
        device = gpu.device
        try:
            self._stream = device.stream()
            ring = Ring(device, max(gpu.ring_bytes, 2 * self.block_bytes))
            slots = Slots(memory.stage, self.block_bytes)
            self._saver = Saver(device, slots, Calibration(), ring)
        except CudaError as error:
            raise failed(error) from error

    def take(self, pages: np.ndarray, stream: int) -> Taken | None:
        """Copies leading blocks of `pages` (a row each) aside, as many as there is room for.

        After what the engine has asked of `stream` (its handle) until now, and before all that it
        asks of it from now on; None without room. Raises StoreUnavailable when the GPU fails.
        """
        with self._lock:
            count = min(len(pages), len(self._free))
            slots = np.array(self._free[:count], np.int32)
            del self._free[:count]
        if not count:
            return None
        # Where this fails the slots stay taken: nobody knows what is still written to them.
        try:
            engine = external(self._gpu.device, stream)
            self._stream.wait(engine.record())
            self._memory.gather(pages[:count], slots, self._stream)
            end = self._stream.record()
            engine.wait(end)
        except CudaError as error:
            raise failed(error) from error
        return Taken(slots, end, self._give_back)

    def source(self, taken: Taken, space: Space) -> SavedBlocks:
        """The blocks as a put to `space` takes them."""
        return SavedBlocks(
            self._saver, self._saving, taken.slots, self.block_bytes, taken.end,
            lambda: registered_staging(self._gpu.registrar, space),
        )  # fmt: skip

    def _give_back(self, slots: np.ndarray) -> None:
        # A later gather is asked of the same stream, and a put has waited for its own copies.
        with self._lock:
            self._free += slots.tolist()

    def close(self) -> None:
        """Waits for what was asked for; no put of taken blocks may run."""
        with self._saving:
            self._saver.close()
