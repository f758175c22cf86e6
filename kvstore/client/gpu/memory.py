"""Where blocks lie in an engine's memory, and copies as arrays of addresses."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from kvstore.cuda.device import Stream


class Parts(NamedTuple):
    """Contiguous pieces that blocks consist of in an engine's memory.

    `addresses` (uint64 [blocks, pieces]) on the device, 0 for a piece that has no place there and
    is left out; `offsets` (uint64 [pieces]) in a block; `length` in bytes, of all pieces or of each
    (uint64 [pieces]).
    """

    addresses: np.ndarray
    offsets: np.ndarray
    length: int | np.ndarray


class Stage(NamedTuple):
    """Device memory of the engine's process for whole blocks, `stride` bytes apart; 3 or more."""

    address: int
    slots: int
    stride: int


def load_slots(stage: Stage) -> int:
    """How many of a stage's slots loads use; the others are for saves, which run beside them."""
    return stage.slots - stage.slots // 3


class EngineMemory(Protocol):
    """An engine's paged KV. `pages` are rows of page numbers, one row a block (int32 [n, k]).

    A block is layer after layer, `layer_bytes` each. `stage` is None, or what `scatter` reads and
    `gather` writes; both do their work in the order of `stream`, on `slots` of the stage.
    """

    layer_count: int
    layer_bytes: int
    stage: Stage | None

    def parts(self, pages: np.ndarray, layers: range) -> Parts | None:
        """Pieces that can be copied as they are; None where a kernel has to rearrange bytes."""
        ...

    def scatter(self, slots: np.ndarray, pages: np.ndarray, layers: range, stream: Stream) -> None:
        """Writes these layers of the pages from blocks of the stage."""
        ...

    def gather(self, pages: np.ndarray, slots: np.ndarray, stream: Stream) -> None:
        """Writes blocks of the stage from the pages."""
        ...


class Copies(NamedTuple):
    """Ranges to copy: uint64 arrays of one length."""

    targets: np.ndarray
    sources: np.ndarray
    lengths: np.ndarray

    @property
    def byte_count(self) -> int:
        return int(self.lengths.sum())

    @property
    def run_bytes(self) -> float:
        """Bytes of a range, on average."""
        return self.byte_count / len(self.lengths) if len(self.lengths) else 0.0

    def turned(self) -> Copies:
        """From targets to sources."""
        return Copies(self.sources, self.targets, self.lengths)

    def merged(self) -> Copies:
        """The same with neighbours that follow each other on both sides made one."""
        if len(self.targets) < 2:
            return self
        follows = (self.targets[:-1] + self.lengths[:-1] == self.targets[1:]) & (
            self.sources[:-1] + self.lengths[:-1] == self.sources[1:]
        )
        if not follows.any():
            return self
        first = np.flatnonzero(np.concatenate(([True], ~follows)))
        lengths = np.add.reduceat(self.lengths, first)
        return Copies(self.targets[first], self.sources[first], lengths)

    def cut(self, bounds: np.ndarray) -> Copies:
        """The same with no source across one of the addresses in `bounds` (sorted)."""
        ends = self.sources + self.lengths
        before = np.searchsorted(bounds, self.sources, "right")
        if (np.searchsorted(bounds, ends, "left") == before).all():
            return self
        pieces = []
        for row in zip(*(column.tolist() for column in self), strict=True):
            target, source, length = row
            inside = bounds[(bounds > source) & (bounds < source + length)].tolist()
            for start, stop in zip([source, *inside], [*inside, source + length], strict=True):
                pieces.append((target + start - source, start, stop - start))
        return copies_of(pieces)


def copies_of(rows: list[tuple[int, int, int]]) -> Copies:
    """Copies from (target, source, length) each."""
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    return Copies(*(np.array(column, np.uint64) for column in columns))


def block_copies(parts: Parts, blocks: np.ndarray, to_blocks: bool = False) -> Copies:
    """Between pieces and blocks that begin at the addresses `blocks` (uint64 [n]), merged."""
    inner = (blocks[:, None] + parts.offsets[None, :]).ravel()
    outer = parts.addresses.ravel()
    lengths = np.broadcast_to(np.asarray(parts.length, np.uint64), parts.addresses.shape).ravel()
    copies = Copies(outer, inner, lengths)
    there = outer != 0
    if not there.all():
        copies = Copies(*(column[there] for column in copies))
    return (copies.turned() if to_blocks else copies).merged()


def layer_groups(layer_count: int, layer_bytes: int, block_count: int) -> list[range]:
    """Consecutive layers that are loaded together.

    Small enough that the first are there long before the last, large enough that a block's part of
    a group and a whole group are worth a transfer.
    """
    layers = max(
        1, -(-GROUP_RUN_BYTES // layer_bytes), -(-GROUP_BYTES // (layer_bytes * block_count))
    )
    return [
        range(first, min(first + layers, layer_count)) for first in range(0, layer_count, layers)
    ]


GROUP_RUN_BYTES = 64 << 10
GROUP_BYTES = 8 << 20
"""0.2 ms at 50 GB/s, against some 10 us for each group."""
