"""One pool of the HBM tier: an allocation of device memory, its slots and what lies in them."""

from __future__ import annotations

import numpy as np

from kvstore.core.block import SLOT_SHIFT
from kvstore.core.errors import CorruptBlock, TierError
from kvstore.cuda.device import Device, Shared
from kvstore.cuda.driver import CudaError
from kvstore.tiers.base import BlockHeader, TierUsage
from kvstore.tiers.slab import Slab, SlotState


class Arena:
    """Slots of one pool by byte offset; overwritten with zeros before anybody can see it (I21).

    Books live in host memory: a GPU forgets with its process, so nothing is recovered.
    """

    def __init__(self, device: Device, number: int, name: str, size_bytes: int) -> None:
        self.number, self.name, self._device = number, name, device
        self.slab = Slab(size_bytes)
        self.generations = np.zeros(self.slab.capacity_bytes >> SLOT_SHIFT, np.uint64)
        self._records: dict[int, tuple[BlockHeader, bytes]] = {}
        try:
            self.address = device.allocate(self.slab.capacity_bytes)
        except CudaError as error:
            raise TierError(
                f"{size_bytes} bytes of GPU {device.uuid} cannot be had: {error}; lower the size "
                "of tier hbm, or let the engine take less"
            ) from error
        stream = device.stream()
        stream.fill(self.address, 0, self.slab.capacity_bytes)
        stream.synchronize()

    def publish(self, offset: int, header: BlockHeader, checksum: bytes, generation: int) -> None:
        """STAGING -> PUBLISHED."""
        _, _, slots = self.slab.publish(offset)
        assert header.length <= slots.slot_bytes, "the payload outgrew its slot"
        self._records[offset] = header, checksum
        self.generations[offset >> SLOT_SHIFT] = generation

    def discard(self, offset: int) -> None:
        """STAGING or PUBLISHED -> RESTING."""
        self.generations[offset >> SLOT_SHIFT] = 0
        self._records.pop(offset, None)
        self.slab.rest(offset)

    def record(self, offset: int) -> tuple[BlockHeader, bytes]:
        """Header and checksum of a published slot; raises CorruptBlock if there is none."""
        found = self._records.get(offset)
        if found is None:
            raise CorruptBlock(f"byte {offset} of hbm pool {self.number} holds no committed block")
        return found

    def usage(self) -> TierUsage:
        slab = self.slab
        return TierUsage(
            slab.capacity_bytes, slab.used_bytes, slab.free_bytes, slab.resting_bytes,
            slab.published_count,
        )  # fmt: skip

    def share(self) -> Shared:
        """The whole arena as another process opens it. Raises TierError if it cannot be shared."""
        try:
            return self._device.share(self.address, self.slab.capacity_bytes)
        except CudaError as error:
            raise TierError(f"pool {self.name!r} of tier hbm cannot be shared: {error}") from error

    def check_integrity(self) -> None:
        """Asserts that allocator, records and generations name the same blocks."""
        self.slab.check_integrity()
        published = set()
        for chunk in self.slab.chunks():
            indexes = np.flatnonzero(self.slab.states(chunk) == SlotState.PUBLISHED)
            published |= set((chunk.offset + indexes * chunk.slot_bytes).tolist())
        shown = set((np.flatnonzero(self.generations) << SLOT_SHIFT).tolist())
        assert published == shown == set(self._records), f"arena {self.number} lost track of blocks"

    def close(self) -> None:
        self._records.clear()
        self._device.free(self.address)
