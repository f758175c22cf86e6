"""`DeviceShare`: the daemon's own memory on this GPU, as one session sees it.

Copies of hot blocks lie there, and come from there a few tens of times faster than from host. With
`copy` the daemon copies what a load asks for into staging of the session; with `in_place` the
engine reads the daemon's arena itself.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from kvstore.client.match import Match
from kvstore.client.session import Session
from kvstore.core.errors import KVStoreError
from kvstore.cuda.device import Device, Event, Shared
from kvstore.cuda.driver import CudaError
from kvstore.proto.v1 import kvstore_pb2 as pb

IN_PLACE = "in_place"
BLOCKS_A_CALL = 1024  # as many as the daemon answers in one turn


class InPlace(NamedTuple):
    """Blocks of a match in the daemon's arena: `address` of it here, int64 `offsets`, -1 for none.

    What was read is right only if `match.check()` passes after the work that read it is done, and
    nothing may be read after `match.release()`, or when the session is over.
    """

    match: Match
    address: int
    length: int
    offsets: np.ndarray


class DeviceShare:
    """Opened memory and its halves by turns; `address` 0 where there is none to be had, and why."""

    def __init__(
        self, device: Device, session: Session, timeout: float, staging_bytes: int = 0
    ) -> None:
        self.session, self.why = session, ""
        self._device, self._timeout = device, timeout
        self.address, self.share = 0, ""
        self._ends: list[Event | None] = [None, None]
        self._turn = 0
        request = pb.AttachDeviceRequest(device_uuid=device.uuid, staging_bytes=staging_bytes)
        try:
            answer: pb.AttachDeviceResponse = session.call("AttachDevice", request, timeout)
            self._shared = Shared(answer.handle, answer.offset, answer.length)
            self.address = device.open(self._shared)
            self.share = answer.share
        except (KVStoreError, CudaError, ValueError) as error:
            self.why = str(error)

    @property
    def length(self) -> int:
        return self._shared.length if self.address else 0

    def load(self, match: Match) -> np.ndarray | None:
        """Addresses (uint64) of the match's blocks here, 0 for those that are not; None if none is.

        With `copy` they lie in a half of the staging, which is in use until `until` says.
        """
        if not self.address or len(match.ranges) != 1 or match.lease is None:
            return None
        offset, room = 0, 0
        if self.share != IN_PLACE:
            offset, room = self._take()
        offsets = self._ask(match, offset, room)
        if offsets is None or (offsets < 0).all():
            return None
        here = np.uint64(self.address) + offsets.clip(0).astype(np.uint64)
        return np.where(offsets < 0, np.uint64(0), here)

    def until(self, end: Event) -> None:
        """What the last `load` found is read until then."""
        self._ends[self._turn] = end

    def in_place(self, match: Match) -> InPlace | None:
        """Where the match's blocks are in the arena; None without one."""
        if not self.address or self.share != IN_PLACE or len(match.ranges) != 1:
            return None
        offsets = self._ask(match, 0, 0)
        return None if offsets is None else InPlace(match, self.address, self.length, offsets)

    def close(self) -> None:
        """No copy from it may run."""
        if self.address:
            with suppress(CudaError):
                self._device.close(self.address, self._shared)
            self.address = 0

    def _take(self) -> tuple[int, int]:
        half, self._turn = self.length // 2, 1 - self._turn
        end, self._ends[self._turn] = self._ends[self._turn], None
        if end is not None:
            end.synchronize()
        return self._turn * half, half

    def _ask(self, match: Match, offset: int, room: int) -> np.ndarray | None:
        """Offsets of the match's blocks; None when the daemon cannot say: host has them, too."""
        (blocks,) = match.ranges
        found: list[np.ndarray] = []
        for first in range(blocks.start, blocks.stop, BLOCKS_A_CALL):
            part = range(first, min(first + BLOCKS_A_CALL, blocks.stop))
            offsets = self._ask_part(match, part, offset, room)
            if offsets is None:
                return None
            used = int((offsets >= 0).sum()) * match.attachment.slot_bytes
            offset, room = offset + used, max(0, room - used)
            found.append(offsets)
        return np.concatenate(found)

    def _ask_part(self, match: Match, blocks: range, offset: int, room: int) -> np.ndarray | None:
        assert match.lease is not None, "a match without a lease has no blocks to load"
        request = pb.LoadDeviceRequest(
            lease_id=match.lease.id, first_block=blocks.start, block_count=len(blocks),
            staging_offset=offset, staging_bytes=room, device_uuid=self._device.uuid,
        )  # fmt: skip
        try:
            answer = self.session.call("LoadDevice", request, self._timeout)
        except KVStoreError as error:
            self.why = str(error)
            return None
        offsets = np.frombuffer(answer.offsets, "<i8")
        width = match.attachment.block_bytes
        fits = len(offsets) == len(blocks) and (offsets + width <= self.length).all()
        return offsets if fits else None
