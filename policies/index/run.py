"""Runs, roots and anchors: what the prefix tree is made of, and what one of them knows alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.core.space import Space

MAX_RUN_BLOCKS = 1024

# State of one shard of a STAGING block.
NONE, RESERVED, COMMITTED = 0, 1, 2
# Stands for a place while a shard is RESERVED: it says in which tier the slot is kept.
RESERVED_PLACE = -2

PLACE_BYTES = 8
ABSENT = NO_PLACE.to_bytes(PLACE_BYTES, "little", signed=True)
# So many children are a tuple, searched in order; more are a dict.
FEW_CHILDREN = 4
# Wider first symbols are filed by their hash: a second copy would outweigh the block itself.
WIDE_SYMBOL_BYTES = 128

# Run.resident and Run.below hold one 32-bit counter a tier, packed into one integer: small ones
# cost no memory of their own, which is what keeps a run of one block within its budget.
COUNTER_BITS = 32
COUNTER_MASK = (1 << COUNTER_BITS) - 1


class Staging:
    """State of a run's STAGING blocks, from `Run.ready` on; arrays are block-major.

    `states` and `owners` have one entry a (block, shard), `places` one a (block, tier, shard).
    In `tier`, where it is being written, it keeps what is above from being a leaf.
    """

    __slots__ = ("owners", "places", "states", "tier")

    def __init__(self, tier: int, states: bytearray, owners: array[int], places: bytearray):
        self.tier = tier
        self.states = states
        self.owners = owners
        self.places = places

    @classmethod
    def empty(cls, tier: int, blocks: int, shards: int, tiers: int) -> Staging:
        cells = blocks * shards
        return cls(
            tier,
            bytearray(cells),
            array("q", bytes(8 * cells)),
            bytearray(ABSENT * (cells * tiers)),
        )

    def cut(self, blocks: int, shards: int, stride: int) -> Staging:
        """Takes the first `blocks` off into a new Staging."""
        cells, place_bytes = blocks * shards, blocks * stride
        front = Staging(
            self.tier, self.states[:cells], self.owners[:cells], self.places[:place_bytes]
        )
        del self.states[:cells], self.owners[:cells], self.places[:place_bytes]
        return front


class Run:
    """Consecutive blocks with one history: a path-compressed edge of the prefix tree.

    While a run lives, its first block and everything above never change: a split leaves the front
    in this object, a merge appends to it, a removal takes blocks off its end. A dead run has
    `ready` -1 and a `parent` that leads up to a living one.

    The first `ready` blocks are READY, the rest STAGING. `places` holds int64s of the READY blocks,
    [block][tier][shard]. `children` is None, the only child, a tuple of a few, or a dict by first
    symbol: most runs have few, and a dict takes as much memory as the run.
    `resident` counts places by tier, `below` the children that keep this run from being a leaf; in
    a tree of several tiers it has one counter more, of children that are anchored or STAGING, in
    or below them.
    `hits` and `touched` (a logical tick) are the history that eviction policies share; `policy`
    is a policy's own.
    """

    __slots__ = (
        "below", "children", "count", "first", "hits", "key", "marks", "parent", "places",
        "policy", "ready", "resident", "root", "staging", "symbols", "touched", "width",
    )  # fmt: skip

    def __init__(self, root: Root, parent: Run | None, first: int, symbols: bytes, width: int):
        self.root = root
        self.parent = parent
        self.first = first
        self.count = len(symbols) // width if width else 0
        self.symbols = symbols
        self.width = width
        self.ready = 0
        self.places = b""
        self.staging: Staging | None = None
        self.children: Children | None = None
        self.marks: dict[int, Mark] | None = None
        self.resident = 0
        self.below = 0
        self.key: bytes | None = None
        self.hits = 0
        self.touched = 0
        self.policy: Any = None

    def __lt__(self, other: Run) -> bool:
        # Ties in a policy's heap: the deeper run goes first.
        return self.first > other.first

    @property
    def alive(self) -> bool:
        return self.ready >= 0

    def symbol(self, i: int) -> bytes:
        """Symbol of block `i` of this run."""
        return self.symbols[i * self.width : (i + 1) * self.width]

    def resident_in(self, tier: int) -> int:
        """How many places of READY blocks the run has in `tier`."""
        return self.resident >> COUNTER_BITS * tier & COUNTER_MASK

    def below_in(self, tier: int) -> int:
        """How many children have something in `tier`, in or below them."""
        return self.below >> COUNTER_BITS * tier & COUNTER_MASK

    def is_leaf(self, tier: int) -> bool:
        """Whether copies in `tier` may be freed here: nothing below it there, nothing STAGING."""
        shift = COUNTER_BITS * tier
        return (
            self.ready > 0
            and self.staging is None
            and not self.below >> shift & COUNTER_MASK
            and bool(self.resident >> shift & COUNTER_MASK)
        )

    def anchored_blocks(self) -> int:
        """How many leading blocks the run's own anchors cover."""
        return max(self.marks) if self.marks else 0

    def __repr__(self) -> str:
        return f"Run(first={self.first}, count={self.count}, ready={self.ready})"


Children = Run | tuple[Run, ...] | dict[bytes | int, Run]


class Root:
    """Where the chains of one (space, adapter, salt) begin; `head` is a run without blocks."""

    __slots__ = ("digest", "head", "space")

    def __init__(self, space: Space, digest: bytes):
        self.space = space
        self.digest = digest
        self.head = Run(self, None, 0, b"", 0)

    @property
    def key(self) -> bytes:
        """Parent key of the first blocks."""
        return self.digest[:16]


class Mark:
    """All anchors on one block: moves as one when its run is split or merged."""

    __slots__ = ("anchors", "depth", "run")

    def __init__(self, run: Run, depth: int):
        self.run: Run | None = run
        self.depth = depth
        self.anchors: set[Anchor] = set()


class Anchor:
    """Ties a lease, pin or reservation to a block, and so to everything above it.

    `run` is None once the block is gone. `depth` counts the blocks of `run` that it covers.
    """

    __slots__ = ("_mark", "owner")

    def __init__(self, mark: Mark, owner: int):
        self._mark = mark
        self.owner = owner

    @property
    def run(self) -> Run | None:
        return self._mark.run

    @property
    def depth(self) -> int:
        return self._mark.depth

    @property
    def block_count(self) -> int:
        """Blocks from the root down to the anchor's; 0 once they are gone."""
        run = self._mark.run
        return 0 if run is None else run.first + self._mark.depth


class Span(NamedTuple):
    """Blocks [start, stop) of a run, counted from the run's first."""

    run: Run
    start: int
    stop: int


class Removed(NamedTuple):
    """What a removal took away.

    `places` has one list a tier. `anchors` died with their blocks. `spans` are the READY blocks,
    parents first; their runs are dead, and `PrefixIndex.keys` of them is right until the next
    change. `grids` has the places of each span, [block][tier][shard].
    """

    places: list[list[int]]
    anchors: list[Anchor]
    spans: list[Span]
    grids: list[np.ndarray]

    def add(self, more: Removed) -> None:
        """Takes what another removal took away."""
        for places, added in zip(self.places, more.places, strict=True):
            places.extend(added)
        self.anchors.extend(more.anchors)
        self.spans.extend(more.spans)
        self.grids.extend(more.grids)


def child_key(symbol: bytes) -> bytes | int:
    """Under what a child is filed by its first symbol."""
    return symbol if len(symbol) <= WIDE_SYMBOL_BYTES else hash(symbol)


def find_child(children: Children, width: int, symbol: bytes) -> Run | None:
    """The child that begins with `symbol`, which is `width` bytes."""
    if isinstance(children, dict):
        child = children.get(child_key(symbol))
        if child is not None and child.width == width and child.symbols.startswith(symbol):
            return child
        # Two symbols of one hash: the later one is filed under itself.
        return children.get(symbol) if width > WIDE_SYMBOL_BYTES else None
    for child in children if isinstance(children, tuple) else (children,):
        if child.width == width and child.symbols.startswith(symbol):
            return child
    return None


def add_child(parent: Run, child: Run) -> None:
    """Files `child` under `parent`; no sibling begins with the same symbol."""
    children = parent.children
    if children is None:
        parent.children = child
    elif isinstance(children, Run):
        parent.children = (children, child)
    elif isinstance(children, dict):
        _file(children, child)
    elif len(children) < FEW_CHILDREN:
        parent.children = (*children, child)
    else:
        filed: dict[bytes | int, Run] = {}
        for one in (*children, child):
            _file(filed, one)
        parent.children = filed


def drop_child(parent: Run, child: Run) -> None:
    """Takes `child` out of its parent's children."""
    children = parent.children
    if isinstance(children, dict):
        symbol = child.symbol(0)
        key = child_key(symbol)
        if children.get(key) is not child:
            key = symbol
        assert children.pop(key) is child, "a run was not among its parent's children"
        if len(children) <= FEW_CHILDREN // 2:
            parent.children = tuple(children.values())
    elif isinstance(children, tuple):
        left = tuple(one for one in children if one is not child)
        assert len(left) == len(children) - 1, "a run was not among its parent's children"
        parent.children = left[0] if len(left) == 1 else left
    else:
        assert children is child, "a run was not among its parent's children"
        parent.children = None


def children_of(run: Run) -> Iterator[Run]:
    """The runs right below `run`."""
    children = run.children
    if children is None:
        return iter(())
    if isinstance(children, dict):
        return iter(children.values())
    return iter(children if isinstance(children, tuple) else (children,))


def _file(children: dict[bytes | int, Run], child: Run) -> None:
    # A run of one block lends its own bytes as the key: no second copy.
    symbol = child.symbols if child.count == 1 else child.symbol(0)
    key = child_key(symbol)
    children[symbol if key in children else key] = child


def common_blocks(symbols: bytes, data: bytes, offset: int, width: int) -> int:
    """How many leading symbols `symbols` and `data[offset:]` share."""
    size = min(len(symbols), len(data) - offset) // width * width
    if not size:
        return 0
    ours = np.frombuffer(symbols, np.uint8, size)
    theirs = np.frombuffer(data, np.uint8, size, offset)
    differs = ours != theirs
    where = int(differs.argmax())
    return where // width if differs[where] else size // width
