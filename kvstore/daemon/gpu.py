"""The tier in a GPU's memory: opened where it is configured, and nothing of CUDA anywhere else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.config import Config
from kvstore.core.errors import ConfigError, TierError
from kvstore.core.generations import Generations

if TYPE_CHECKING:
    from kvstore.tiers.hbm import HbmTier

REGISTER_BYTES = 1 << 30

_log = logging.getLogger("kvstore.daemon")


class Gpu:
    """The hbm tier, and the thread that registers host pools with its GPU.

    Until a pool is registered, and where it cannot be, its blocks go up through buffers.
    """

    def __init__(self, tier: HbmTier, memories: Sequence[np.ndarray]) -> None:
        self.tier = tier
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._register, args=(memories,), name="kvstore gpu", daemon=True
        )
        self._thread.start()

    def _register(self, memories: Sequence[np.ndarray]) -> None:
        try:
            for memory in memories:
                for start in range(0, len(memory), REGISTER_BYTES):
                    if self._stop.is_set():
                        return
                    self.tier.use_stable_memory(memory[start : start + REGISTER_BYTES])
        except TierError as error:
            _log.warning("blocks go to tier hbm through buffers: %s", error)

    def close(self) -> None:
        """No worker may be inside the tier."""
        self._stop.set()
        self._thread.join()
        self.tier.close()


def open_gpu(
    config: Config, memories: Sequence[np.ndarray], generations: Generations
) -> Gpu | None:
    """Opens the configured tier; None without one. Raises ConfigError naming the key."""
    hbm = config.tiers.hbm
    if hbm.size is None:
        return None
    from kvstore.cuda.device import Device
    from kvstore.cuda.driver import CudaError, CudaUnavailable
    from kvstore.tiers.hbm import HbmTier

    try:
        device = Device(hbm.device)
        tier = HbmTier(device, {"": int(hbm.size)}, generations=generations)
    except CudaUnavailable as error:
        raise ConfigError(
            f"tiers.hbm.size is set, but {error}; remove the table, or correct tiers.hbm.device"
        ) from error
    except (CudaError, TierError) as error:
        raise ConfigError(f"tiers.hbm.size is {hbm.size}: {error}") from error
    _log.info("tier hbm has %s of %s", hbm.size, device.uuid)
    return Gpu(tier, memories)
