"""Payloads between memory and encrypted segments: sealed on the way out, opened on the way in.

Workers alone come here, and let other threads run while they encrypt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvstore.core.errors import TierError
from kvstore.tiers.disk.entries import identity
from kvstore.tiers.disk.io import FileIO, bounce, whole_pages
from kvstore.tiers.disk.quickest import huge_buffer
from kvstore.tiers.disk.segments import Segment
from kvstore.tiers.disk.transfer import Item, Transfer, runs
from kvstore.tiers.payload import digest

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Opener, Sealer, Vault

FORGED = b""
"""The checksum of a payload that is not genuine: none that a block can have."""


class SealedTransfer(Transfer):
    """Writes with the vault's first key. Raises OSError, and TierError for what does not open."""

    def __init__(
        self, io: FileIO, is_direct: Callable[[], bool], vault: Vault, store_id: bytes
    ) -> None:
        super().__init__(io, is_direct)
        self._vault, self._store_id = vault, store_id

    def write_many(self, items: Sequence[Item]) -> list[bytes]:
        checksums = [b""] * len(items)
        for run in runs(items):
            self._write_run(run)
            for item in run:
                checksums[item.number] = digest(item.memory)
        return checksums

    def _write_run(self, run: list[Item]) -> None:
        """Encrypts neighbours into one buffer after another, each written when it is full."""
        segment, buffer, filled = run[0].segment, huge_buffer(), 0
        size = segment.geometry.payload_bytes
        at = segment.geometry.payload_at(run[0].slot)
        for item in run:
            sealer = self._sealer(item)
            start = 0
            while start < size:
                count = min(len(buffer) - filled, size - start)
                _fill(sealer, item.memory[start : start + count], buffer[filled : filled + count])
                start, filled = start + count, filled + count
                if filled == len(buffer):
                    self._io.write_all(segment.fd, [buffer], at)
                    at, filled = at + filled, 0
            self._keep(item, sealer)
        if filled:
            self._io.write_all(segment.fd, [buffer[:filled]], at)

    def write(self, item: Item) -> bytes:
        payload, buffer, sealed = item.memory, bounce(), huge_buffer()
        size, sealer = item.segment.geometry.payload_bytes, self._sealer(item)
        at, check = item.segment.geometry.payload_at(item.slot), xxhash.xxh3_128()
        for start in range(0, size, len(buffer)):
            count = min(len(buffer), size - start)
            part = payload[start : start + count]
            copied = buffer[: len(part)]
            np.copyto(copied, part)
            check.update(copied.data)
            _fill(sealer, copied, sealed[:count])
            self._io.write_all(item.segment.fd, [sealed[:count]], at + start)
        self._keep(item, sealer)
        return check.digest()

    def read_many(self, items: Sequence[Item], length: int) -> list[bytes | None]:
        checksums: list[bytes | None] = [None] * len(items)
        for run in runs([item for item in items if len(item.memory) >= length]):
            if run[0].segment.geometry.payload_bytes != whole_pages(length):
                self._open_singly(run, length, checksums)
                continue
            try:
                self._open_run(run, length, checksums)
            except OSError:
                self._open_singly(run, length, checksums)
        self._forget(items)
        return checksums

    def _open_singly(self, run: list[Item], length: int, checksums: list[bytes | None]) -> None:
        for item in run:
            try:
                self._open_run([item], length, checksums)
            except OSError:
                checksums[item.number] = None

    def _open_run(self, run: list[Item], length: int, checksums: list[bytes | None]) -> None:
        """Payloads back to back, or one of any size."""
        segment, buffer, pages = run[0].segment, huge_buffer(), whole_pages(length)
        openers = [self._opener(item.segment, item.slot) for item in run]
        at, total = segment.geometry.payload_at(run[0].slot), len(run) * pages
        for first in range(0, total, len(buffer)):
            piece = buffer[: min(len(buffer), total - first)]
            self._io.read_all(segment.fd, [piece], at + first)
            _open_piece(piece, first, run, openers, length)
        for item, opener in zip(run, openers, strict=True):
            genuine = opener.is_genuine()
            item.memory[length if genuine else 0 : pages] = 0
            checksums[item.number] = digest(item.memory[:length]) if genuine else FORGED

    def _read(self, item: Item, length: int) -> None:
        try:
            super()._read(item, length)
        except TierError:
            item.memory[:length] = 0  # nothing that is not genuine stays behind
            raise

    def _pieces(
        self, segment: Segment, index: int, length: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Raises TierError behind the last piece if they are not genuine."""
        opener, opened = self._opener(segment, index), huge_buffer()
        for start, piece in super()._pieces(segment, index, length):
            opener.update(piece, opened[: len(piece)])
            yield start, opened[: len(piece)]
        if not opener.is_genuine():
            raise TierError(
                f"the payload in slot {index} of segment {segment.serial} is not what was "
                f"encrypted there, or has not {length} bytes; recompute it"
            )

    def _place(self, segment: Segment, slot: int) -> bytes:
        return identity(b"payload", self._store_id, segment.serial, slot)

    def _sealer(self, item: Item) -> Sealer:
        return self._vault.sealer(self._place(item.segment, item.slot))

    def _opener(self, segment: Segment, slot: int) -> Opener:
        seal = self._vault.expand(segment.seals[slot])
        opener = self._vault.opener(seal, self._place(segment, slot)) if seal else None
        if opener is None:
            raise TierError(f"slot {slot} of segment {segment.serial} was never written; recompute")
        return opener

    def _keep(self, item: Item, sealer: Sealer) -> None:
        """The slot is being written, so nobody else looks at its seal."""
        item.segment.seals[item.slot] = self._vault.compact(sealer.finish())


def _fill(sealer: Sealer, plain: np.ndarray, out: np.ndarray) -> None:
    """Encrypts `plain` to the start of `out`; the rest of it becomes zeros."""
    if len(plain):
        sealer.update(plain, out[: len(plain)])
    out[len(plain) :] = 0


def _open_piece(
    piece: np.ndarray, first: int, run: list[Item], openers: list[Opener], length: int
) -> None:
    """Decrypts bytes [first, first + len(piece)) of a run to the items they belong to."""
    pages, done = whole_pages(length), 0
    while done < len(piece):
        number, inside = divmod(first + done, pages)
        count = min(pages - inside, len(piece) - done)
        used = min(count, length - inside)
        if used > 0:
            target = run[number].memory[inside : inside + used]
            openers[number].update(piece[done : done + used], target)
        done += count
