"""vLLM's KV caches on a GPU as bytes: where a block's pieces lie, and copies of them.

A page (one block of one layer) is opaque, as in `pages`, and its bytes are taken in the order in
which they lie in memory: one piece where a block is dense, two where K and V of all blocks lie
apart, more where heads do. Neighbouring pages of several layers are one piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.client.gpu import Parts, Stage, Stream
from kvstore.core.errors import InvalidRequest, SpecError
from kvstore.engines.torch_streams import on_stream, sent_to
from kvstore.engines.vllm.pages import Groups, layer_number

PIECES_MAX = 64  # of a page: more are tokens that lie apart, and no layout of vLLM's
CHUNK_BYTES = 32 << 20  # of pages that torch gathers or scatters at once, through as much memory
WORDS = (8, 4, 2, 1)  # bytes that are moved as one number, the widest that fits


class Piece(NamedTuple):
    """Bytes of every block: `length` of block n at `address + n * step`; `storage` holds them."""

    address: int
    length: int
    step: int
    storage: Any


class DevicePages:
    """The pages of all layers of one KV-cache group on a GPU, by vLLM's block ids.

    `caches` are tensors [num_blocks, …] or [2, num_blocks, …], in any order of their other axes;
    raises SpecError for others. Layers that share a tensor have one page.
    """

    def __init__(self, caches: Mapping[str, Any], num_blocks: int) -> None:
        names = sorted(caches, key=layer_number)
        found: dict[int, list[Piece]] = {}
        for name in names:
            found.setdefault(caches[name].data_ptr(), _pieces(name, caches[name], num_blocks))
        self.layers = tuple(dict.fromkeys(map(layer_number, names)))
        self.pieces = _joined([piece for pieces in found.values() for piece in pieces])
        self.num_blocks = num_blocks
        self.block_bytes = sum(piece.length for piece in self.pieces)


class DeviceGroups:
    """The pages of all KV-cache groups on a GPU: as `Groups`, for block ids as rows of numbers."""

    def __init__(self, groups: Sequence[DevicePages], blocks_each: int) -> None:
        self.groups, self.blocks_each = groups, blocks_each
        self.block_bytes = blocks_each * sum(group.block_bytes for group in groups)

    def rows(self, block_ids: Sequence[Sequence[int]], count: int) -> np.ndarray:
        """vLLM's blocks of `count` store blocks, a row each: every group's, one after the other."""
        rows = [np.array(ids, np.int32).reshape(count, self.blocks_each) for ids in block_ids]
        for found, group in zip(rows, self.groups, strict=True):
            if count and not 0 <= found.min() <= found.max() < group.num_blocks:
                raise InvalidRequest(
                    f"blocks {found.min()} to {found.max()} were named of {group.num_blocks}; "
                    "nothing is copied"
                )
        return np.concatenate(rows, 1)

    @property
    def run_bytes(self) -> float:
        """Bytes of a piece, on average."""
        pieces = sum(len(group.pieces) for group in self.groups)
        return self.block_bytes / self.blocks_each / max(1, pieces)


class OpaqueMemory:
    """vLLM's memory as `kvstore.client.gpu` sees it: a store block is one layer of many pieces.

    `slots` blocks fit into its stage, if it has one. Null blocks are left out.
    """

    layer_count = 1

    def __init__(self, groups: DeviceGroups, stage: Any = None) -> None:
        self._groups, self._blocks = groups, stage
        self.layer_bytes = groups.block_bytes
        self.stage: Stage | None = None
        if stage is not None:
            self.stage = Stage(stage.data_ptr(), len(stage), stage.stride(0))
        self._columns, self._starts, self._steps, self._offsets, self._lengths = _table(groups)

    def parts(self, pages: np.ndarray, layers: range) -> Parts:
        blocks = pages[:, self._columns].astype(np.uint64)
        addresses = blocks * self._steps + self._starts
        addresses[blocks == Groups.NULL_BLOCK] = 0
        return Parts(addresses, self._offsets, self._lengths)

    def scatter(self, slots: np.ndarray, pages: np.ndarray, layers: range, stream: Stream) -> None:
        with on_stream(self._blocks.device, stream):
            for staged, blocks, (slot, nth, block) in self._chunks(slots, pages):
                blocks[:, block] = staged[slot, nth].transpose(0, 1)

    def gather(self, pages: np.ndarray, slots: np.ndarray, stream: Stream) -> None:
        with on_stream(self._blocks.device, stream):
            for staged, blocks, (slot, nth, block) in self._chunks(slots, pages):
                staged[slot, nth] = blocks[:, block].transpose(0, 1)

    def _chunks(self, slots: np.ndarray, pages: np.ndarray) -> Iterator[tuple[Any, Any, Any]]:
        """What to copy between: the stage [slot, nth block, piece, word] and the pages [piece,
        block, word]; and numbers [3, n] of slots, of blocks within them, and of vLLM's blocks.
        """
        each, start = self._groups.blocks_each, 0
        for index, group in enumerate(self._groups.groups):
            blocks = pages[:, index * each : (index + 1) * each]
            row, nth = np.nonzero(blocks != Groups.NULL_BLOCK)
            numbers = np.stack([slots[row], nth, blocks[row, nth]]).astype(np.int64)
            step = max(1, CHUNK_BYTES // group.block_bytes)
            for first in range(0, len(row), step):
                sent = sent_to(self._blocks.device, numbers[:, first : first + step])
                for staged, there in self._views(group, start):
                    yield staged, there, sent
            start += each * group.block_bytes

    def _views(self, group: DevicePages, start: int) -> Iterator[tuple[Any, Any]]:
        """Views of the stage and the pages, for as many pieces at once as lie evenly."""
        each, width = self._groups.blocks_each, group.block_bytes
        for pieces in _even(group.pieces):
            first, length = pieces[0], pieces[0].length
            distance = pieces[1].address - first.address if len(pieces) > 1 else length
            there = _Bytes(
                first.storage, first.address, (len(pieces), group.num_blocks, length),
                (distance, first.step),
            )  # fmt: skip
            staged = _Bytes(
                self._blocks.untyped_storage(), self._blocks.data_ptr() + start,
                (len(self._blocks), each, len(pieces), length),
                (self._blocks.stride(0), width, length),
            )  # fmt: skip
            word = next(w for w in WORDS if there.fits(w) and staged.fits(w))
            yield staged.words(word), there.words(word)
            start += len(pieces) * length


def order_of(cache: Any, num_blocks: int) -> str:
    """A name for how a page's axes lie: sizes of its axes, and their order from outer to inner."""
    shape, strides = list(cache.shape), list(cache.stride())
    del shape[_block_axis("it", cache, num_blocks)], strides[_block_axis("it", cache, num_blocks)]
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    return f"{'x'.join(map(str, shape))}:{''.join(map(str, order))}"


def _block_axis(name: str, cache: Any, num_blocks: int) -> int:
    """Which axis is that of blocks, or of the parts that kernels cut blocks into."""
    sizes = list(cache.shape[:2])
    fits = [axis for axis, size in enumerate(sizes) if size >= num_blocks and not size % num_blocks]
    # Before the axis of blocks there is none, or that of K and V, from which two could not be told.
    if not fits or (fits[0] == 1 and sizes[0] > 2) or num_blocks <= 2:
        raise SpecError(
            f"the KV cache of {name} has shape {tuple(cache.shape)}; kvstore needs "
            f"{num_blocks} blocks in its first axis, or in its second after K and V"
        )
    return fits[0]


def _pieces(name: str, cache: Any, num_blocks: int) -> list[Piece]:
    """A page's pieces in the order in which they lie in memory."""
    axis, size = _block_axis(name, cache, num_blocks), cache.element_size()
    axes = [(n, step * size) for n, step in zip(cache.shape, cache.stride(), strict=True)]
    count, step = axes.pop(axis)
    if count != num_blocks:  # kernels cut a block into parts, which lie one after the other
        axes.append((count // num_blocks, step))
        step *= count // num_blocks
    axes = sorted((a for a in axes if a[0] > 1), key=lambda a: a[1])
    length = size
    while axes and axes[0][1] == length:
        length *= axes.pop(0)[0]
    count, offsets = math.prod(n for n, _ in axes), [0]
    for n, distance in axes if count <= PIECES_MAX else ():
        offsets = [outer * distance + inner for outer in range(n) for inner in offsets]
    distances = [step, *(b - a for a, b in itertools.pairwise(offsets))]
    if count > PIECES_MAX or min(distances) < length:
        raise SpecError(
            f"the KV cache of {name} has shape {tuple(cache.shape)} and strides {cache.stride()}: "
            f"a block is {count} pieces of {length} bytes; kvstore needs {PIECES_MAX} at most, "
            "none over another"
        )
    storage, address = cache.untyped_storage(), cache.data_ptr()
    return [Piece(address + offset, length, step, storage) for offset in offsets]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The same with pieces that follow each other in every block made one."""
    found = pieces[:1]
    for piece in pieces[1:]:
        last = found[-1]
        if (last.address + last.length, last.step) == (piece.address, piece.step):
            found[-1] = last._replace(length=last.length + piece.length)
        else:
            found.append(piece)
    return found


def _even(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces in runs that one view covers: alike, in one storage, at one distance."""
    run = pieces[:1]
    for piece in pieces[1:]:
        distance = piece.address - run[-1].address
        is_alike = piece[1:3] == run[-1][1:3] and distance > 0
        is_near = piece.storage.data_ptr() == run[-1].storage.data_ptr()
        if is_alike and is_near and (len(run) < 2 or distance == run[1].address - run[0].address):
            run.append(piece)
        else:
            yield run
            run = [piece]
    yield run


class _Bytes(NamedTuple):
    """A view of bytes in a storage; the last of `shape` lie one after the other."""

    storage: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def fits(self, word: int) -> bool:
        """Whether it can be seen as words of so many bytes."""
        base = self.storage.data_ptr()
        numbers = (base, self.address - base, self.shape[-1], *self.strides)
        return not any(number % word for number in numbers)

    def words(self, word: int) -> Any:
        import torch

        dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]
        view = torch.empty(0, dtype=dtype, device=self.storage.device)
        offset = (self.address - self.storage.data_ptr()) // word
        shape = (*self.shape[:-1], self.shape[-1] // word)
        strides = (*(stride // word for stride in self.strides), 1)
        return view.set_(self.storage, offset, shape, strides)


def _table(groups: DeviceGroups) -> tuple[np.ndarray, ...]:
    """Every piece of a store block: its column in rows of blocks, and where it is by block id."""
    rows, offset = [], 0
    for index, group in enumerate(groups.groups):
        for nth in range(groups.blocks_each):
            for piece in group.pieces:
                column = index * groups.blocks_each + nth
                rows.append((column, piece.address, piece.step, offset, piece.length))
                offset += piece.length
    table = np.array(rows, np.uint64)
    return table[:, 0].astype(np.intp), *(np.ascontiguousarray(table[:, n]) for n in range(1, 5))
