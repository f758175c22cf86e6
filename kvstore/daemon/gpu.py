"""The tier in GPUs' memory: opened where it is configured, and nothing of CUDA anywhere else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.config import Config
from kvstore.core.config_hbm import device_bytes, device_uuids
from kvstore.core.errors import ConfigError, TierError
from kvstore.core.generations import Generations

if TYPE_CHECKING:
    from kvstore.tiers.hbm import HbmTier

REGISTER_BYTES = 1 << 30

_log = logging.getLogger("kvstore.daemon")


class Gpus:
    """The hbm tier on each of its GPUs, and the thread that registers host pools with them.

    Until a pool is registered, and where it cannot be, its blocks go up through buffers.
    """

    def __init__(self, tiers: Sequence[HbmTier], memories: Sequence[np.ndarray]) -> None:
        self.tiers = tuple(tiers)
        self._stop = threading.Event()
        self._known: list[tuple[int, int]] = []
        self._thread: threading.Thread | None = None
        self.follow(memories)

    def follow(self, memories: Sequence[np.ndarray]) -> None:
        """Registers what of these is not known yet; it has its memory for good."""
        before, parts = self._thread, list(_unknown(self._known, memories))
        self._known += [(part.ctypes.data, part.ctypes.data + len(part)) for part in parts]
        self._thread = threading.Thread(
            target=self._register, args=(parts, before), name="kvstore gpu", daemon=True
        )
        self._thread.start()

    def _register(self, parts: Sequence[np.ndarray], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        first, *others = self.tiers
        try:
            for part in parts:
                if self._stop.is_set():
                    return
                first.use_stable_memory(part)  # portable: every GPU knows it from now on
                for tier in others:
                    tier.use_stable_memory(part, register=False)
        except TierError as error:
            _log.warning("blocks go to tier hbm through buffers: %s", error)

    def close(self) -> None:
        """No worker may be inside the tiers."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for tier in reversed(self.tiers):  # the first one holds what is registered
            tier.close()


def _unknown(
    known: Sequence[tuple[int, int]], memories: Sequence[np.ndarray]
) -> Iterator[np.ndarray]:
    """Parts of the memories that lie in no known range (address, end), none larger than one goes.

    A range lies in a memory whole, or outside.
    """
    for memory in memories:
        base, start = memory.ctypes.data, 0
        inside = sorted(r for r in known if base <= r[0] and r[1] <= base + len(memory))
        for low, high in [*inside, (base + len(memory), 0)]:
            for at in range(start, low - base, REGISTER_BYTES):
                yield memory[at : min(at + REGISTER_BYTES, low - base)]
            start = high - base


def open_gpus(
    config: Config, memories: Sequence[np.ndarray], generations: Generations
) -> Gpus | None:
    """Opens the configured tier; None without one. Raises ConfigError naming the key."""
    hbm = config.tiers.hbm
    if hbm.size is None:
        return None
    from kvstore.cuda.device import Device
    from kvstore.cuda.driver import CudaError, CudaUnavailable
    from kvstore.tiers.hbm import HbmTier

    tiers: list[HbmTier] = []
    size, key = device_bytes(hbm), "devices" if hbm.devices else "device"
    try:
        for uuid in device_uuids(hbm):
            device = Device(uuid)
            tiers.append(HbmTier(device, {"": size}, generations=generations))
            _log.info("tier hbm has %s of %s", size, device.uuid)
        for tier, other in permutations(tiers, 2):
            if not tier.device.reach(other.device):
                _log.info(
                    "copies from %s to %s go through host memory",
                    other.device_uuid, tier.device_uuid,
                )  # fmt: skip
    except (CudaUnavailable, CudaError, TierError) as error:
        for opened in tiers:
            opened.close()
        if isinstance(error, CudaUnavailable):
            raise ConfigError(
                f"tiers.hbm.size is set, but {error}; remove the table, or correct tiers.hbm.{key}"
            ) from error
        raise ConfigError(f"tiers.hbm.size is {hbm.size}: {error}") from error
    return Gpus(tiers, memories)
