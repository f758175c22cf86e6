"""A session's device memory: what an engine is shown of the arena, a copy of what it asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvstore.core.errors import TierError
from kvstore.cuda.device import Device, Event, Shared
from kvstore.cuda.driver import CudaError


class Arenas(Protocol):
    """Where blocks are copied from: a tier in a GPU's memory."""

    device: Device

    def address(self, place: int) -> int: ...


class DeviceStaging:
    """Memory that the daemon fills and one engine opens; the arena itself stays unseen.

    Copies run on a stream of the session's own. A slot that is copied from must keep its block
    until the event that `load` returns is done.
    """

    def __init__(self, arenas: Arenas, length: int) -> None:
        self._arenas, self.length = arenas, length
        device = self._device = arenas.device
        try:
            self.address = device.allocate(length)
        except CudaError as error:
            raise TierError(
                f"{length} bytes of device staging cannot be had: {error}; lower the session's "
                "staging or the size of tier hbm"
            ) from error
        self._stream = device.stream()
        self._stream.fill(self.address, 0, length)
        self._stream.synchronize()

    def share(self) -> Shared:
        """What the engine opens. Raises TierError where the memory cannot be shared."""
        try:
            return self._device.share(self.address, self.length)
        except CudaError as error:
            raise TierError(f"device staging cannot be shared: {error}") from error

    def load(
        self, blocks: Sequence[tuple[int, int]], length: int, source: Arenas | None = None
    ) -> Event:
        """Copies `length` bytes of each (place, offset in the staging); the event of their end.

        From the tier's own arenas, or those of a `source` on another GPU.
        """
        for _, offset in blocks:
            if offset < 0 or offset + length > self.length:
                raise TierError(f"byte {offset} + {length} lies outside the session's staging")
        arenas = source or self._arenas
        sources = np.array([arenas.address(place) for place, _ in blocks], np.uint64)
        targets = np.array([self.address + offset for _, offset in blocks], np.uint64)
        try:
            if source is None:
                self._stream.copy_many(targets, sources, np.full(len(blocks), length, np.uint64))
            else:
                for target, begin in zip(targets.tolist(), sources.tolist(), strict=True):
                    self._stream.copy_from(source.device, target, begin, length)
            return self._stream.record()
        except CudaError as error:
            raise TierError(f"GPU {self._device.uuid} failed: {error}") from error

    def fill(
        self, blocks: Sequence[tuple[int, int]], length: int, source: Arenas | None = None
    ) -> None:
        """`load`, and waits for its end. Raises TierError."""
        end = self.load(blocks, length, source)
        try:
            end.synchronize()
        except CudaError as error:
            raise TierError(f"GPU {self._device.uuid} failed: {error}") from error

    def close(self) -> None:
        """After the engine is gone or has let go: a copy that runs is waited for."""
        self._stream.synchronize()
        self._device.free(self.address)
