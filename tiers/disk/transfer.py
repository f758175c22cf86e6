"""Payloads between memory and segment files: many at once where slots are neighbours.

Aligned memory goes straight to and from the medium; anything else through a thread's own aligned
buffer. What lies in a slot behind its payload is written as zeros.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.core.clock import perf_seconds
from kvstore.core.errors import TierError
from kvstore.tiers.disk.io import PAGE, FileIO, bounce, is_aligned, whole_pages
from kvstore.tiers.disk.quickest import COPIED, STRAIGHT, Quickest, huge_buffer
from kvstore.tiers.disk.segments import Segment
from kvstore.tiers.payload import digest

CHOICE_BYTES = 256 << 10
RUN_BYTES = 4 << 20
"""Moved in one call at most: enough for a disk's bandwidth, and what syncs waits for no more."""


class Item(NamedTuple):
    """A slot, and the memory (uint8) to fill it from or to fill."""

    number: int
    segment: Segment
    slot: int
    memory: np.ndarray


def runs(items: Sequence[Item]) -> list[list[Item]]:
    """Items by place, cut where slots are no neighbours or a run gets too large."""
    found: list[list[Item]] = []
    for item in sorted(items, key=lambda item: (item.segment.serial, item.slot)):
        if found:
            last, size = found[-1][-1], item.segment.geometry.payload_bytes
            fits = (len(found[-1]) + 1) * size <= RUN_BYTES
            if fits and last.segment is item.segment and last.slot + 1 == item.slot:
                found[-1].append(item)
                continue
        found.append([item])
    return found


class Transfer:
    """Reads and writes payloads of segments whose files are there. Raises OSError."""

    def __init__(self, io: FileIO, is_direct: Callable[[], bool]) -> None:
        self._io, self._is_direct = io, is_direct
        self._quickest = Quickest()

    def write_many(self, items: Sequence[Item]) -> list[bytes]:
        """Checksums in the order of the items' numbers, which count from 0."""
        checksums = [b""] * len(items)
        direct = [item for item in items if _fills_slot(item)]
        for run in runs(direct):
            segment = run[0].segment
            at = segment.geometry.payload_at(run[0].slot)
            self._io.write_all(segment.fd, [item.memory for item in run], at)
            for item in run:
                checksums[item.number] = digest(item.memory)
        for item in items:
            if not checksums[item.number]:
                checksums[item.number] = self.write(item)
        return checksums

    def write(self, item: Item) -> bytes:
        """Copies first, so that the checksum fits what is stored whatever the source does."""
        payload, buffer = item.memory, bounce()
        size = item.segment.geometry.payload_bytes
        at, check = item.segment.geometry.payload_at(item.slot), xxhash.xxh3_128()
        for start in range(0, size, len(buffer)):
            piece = buffer[: min(len(buffer), size - start)]
            part = payload[start : start + len(piece)]
            np.copyto(piece[: len(part)], part)
            piece[len(part) :] = 0
            check.update(piece[: len(part)].data)
            self._io.write_all(item.segment.fd, [piece], at + start)
        return check.digest()

    def read_many(self, items: Sequence[Item], length: int) -> list[bytes | None]:
        """Checksums in the order of the items' numbers; None where reading failed."""
        checksums: list[bytes | None] = [None] * len(items)
        pages = whole_pages(length)
        direct = [i for i in items if len(i.memory) >= pages and is_aligned(i.memory)]
        whole = [item for item in direct if item.segment.geometry.payload_bytes == pages]
        done = {item.number for run in runs(whole) if self._read_run(run, pages) for item in run}
        for item in items:
            if item.number in done or self._try_read(item, length):
                checksums[item.number] = digest(item.memory[:length])
        self._forget(items)
        return checksums

    def _read_run(self, run: list[Item], pages: int) -> bool:
        total = len(run) * pages
        way = self._quickest.choose() if total >= CHOICE_BYTES else STRAIGHT
        began = perf_seconds()
        try:
            (self._read_copied if way == COPIED else self._read_straight)(run, pages)
        except OSError:
            return False  # one by one, to find out which
        if total >= CHOICE_BYTES:
            self._quickest.took(way, total, perf_seconds() - began)
        return True

    def _read_straight(self, run: list[Item], pages: int) -> None:
        segment = run[0].segment
        at = segment.geometry.payload_at(run[0].slot)
        self._io.read_all(segment.fd, [item.memory[:pages] for item in run], at)

    def _read_copied(self, run: list[Item], pages: int) -> None:
        segment, buffer = run[0].segment, huge_buffer()
        at, total = segment.geometry.payload_at(run[0].slot), len(run) * pages
        for first in range(0, total, len(buffer)):
            piece = buffer[: min(len(buffer), total - first)]
            self._io.read_all(segment.fd, [piece], at + first)
            _scatter(piece, first, run, pages)

    def _try_read(self, item: Item, length: int) -> bool:
        try:
            self._read(item, length)
        except (OSError, TierError):
            return False
        return True

    def read(self, item: Item, length: int) -> None:
        self._read(item, length)
        self._forget([item])

    def _read(self, item: Item, length: int) -> None:
        if len(item.memory) < length:
            raise TierError(
                f"a target of {len(item.memory)} bytes is too small for {length}; pass a larger one"
            )
        for start, piece in self._pieces(item.segment, item.slot, length):
            np.copyto(item.memory[start : start + len(piece)], piece)
        item.memory[length : whole_pages(length)] = 0

    def checksum(self, segment: Segment, index: int, length: int) -> bytes:
        """xxh3_128 of what is stored."""
        check = xxhash.xxh3_128()
        for _, piece in self._pieces(segment, index, length):
            check.update(piece.data)
        return check.digest()

    def _pieces(
        self, segment: Segment, index: int, length: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """A payload piece by piece in this thread's buffer: each is gone with the next."""
        buffer, at = bounce(), segment.geometry.payload_at(index)
        if length > segment.geometry.payload_bytes:
            raise TierError(f"a slot of {segment.geometry.payload_bytes} bytes has no {length}")
        for start in range(0, length, len(buffer)):
            count = min(len(buffer), length - start)
            self._io.read_all(segment.fd, [buffer[: whole_pages(count)]], at + start)
            yield start, buffer[:count]

    def _forget(self, items: Sequence[Item]) -> None:
        """Without O_DIRECT: drops what was read from the page cache; it is cached above."""
        if not self._is_direct():
            for item in items:
                geometry = item.segment.geometry
                at = geometry.payload_at(item.slot)
                os.posix_fadvise(
                    item.segment.fd, at, geometry.payload_bytes, os.POSIX_FADV_DONTNEED
                )


def _scatter(piece: np.ndarray, first: int, run: list[Item], pages: int) -> None:
    """Copies bytes [first, first + len(piece)) of a run to the items they belong to."""
    done = 0
    while done < len(piece):
        number, inside = divmod(first + done, pages)
        count = min(pages - inside, len(piece) - done)
        np.copyto(run[number].memory[inside : inside + count], piece[done : done + count])
        done += count


def _fills_slot(item: Item) -> bool:
    """Whether the memory can be written as it is."""
    size = item.segment.geometry.payload_bytes
    return len(item.memory) == size and size % PAGE == 0 and is_aligned(item.memory)
