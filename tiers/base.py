"""The `Tier` protocol: what the store may ask of any place that keeps blocks, and its contract.

Two kinds of callers. The *owner thread* keeps the books: it alone calls everything except the
byte movers, and those calls never wait for bytes (where `durable` is True, `commit` and `header`
wait for the medium and are called from workers instead). *Worker threads* call `write`, `read`,
`verify`, `copy` and their forms for many blocks, which release the GIL and touch no books; the
owner guarantees that a place a worker was given keeps its slot until the worker is done.

A slot is FREE, STAGING, PUBLISHED or RESTING; `reserve` makes STAGING of FREE, `commit`
PUBLISHED of STAGING, `discard` RESTING of either, `free` FREE of RESTING. Nothing else moves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

Source = memoryview | np.ndarray
"""Contiguous bytes to copy from."""
Target = memoryview | np.ndarray
"""Contiguous writable bytes to copy into."""

CHECKSUM_BYTES = 16


class BlockHeader(NamedTuple):
    """What is kept beside a payload: enough to rebuild an index without any other file."""

    space: bytes
    root: bytes
    key: bytes
    parent_key: bytes
    position: int
    shard: int
    epoch: int
    length: int
    symbol: bytes


class StoredBlock(NamedTuple):
    """A block found at recovery; `checksum` is the xxh3_128 its payload had when written."""

    place: int
    header: BlockHeader
    checksum: bytes
    generation: int


ROW = np.dtype(
    [
        ("place", "<i8"), ("generation", "<u8"), ("epoch", "<u8"), ("length", "<u8"),
        ("position", "<u4"), ("shard", "<u4"),
        ("space", "V32"), ("root", "V32"), ("key", "V16"), ("parent_key", "V16"),
        ("checksum", "V16"),
    ]
)  # fmt: skip


class StoredColumns(NamedTuple):
    """Blocks found at recovery: `rows` (dtype ROW) and the symbol of each."""

    rows: np.ndarray
    symbols: list[bytes]


class TierUsage(NamedTuple):
    """Bytes and blocks of a tier or pool; used + free + resting = capacity, always.

    Bytes are counted in whole slots: a payload's padding is used with it. What no slot can take
    (the tail of a chunk, chunks of no class) is free. `used_bytes` covers STAGING and PUBLISHED.
    """

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    resting_bytes: int
    block_count: int

    def __add__(self, other: object) -> TierUsage:
        assert isinstance(other, TierUsage), "a usage adds up with a usage only"
        return TierUsage(*(a + b for a, b in zip(self, other, strict=True)))


NO_USAGE = TierUsage(0, 0, 0, 0, 0)


class SharedPool(NamedTuple):
    """What a client on this host maps; both descriptors are open read-only and stay the tier's."""

    pool_id: int
    name: str
    data_fd: int
    generations_fd: int
    data_bytes: int
    generation_bytes: int


@runtime_checkable
class Tier(Protocol):
    """A place that keeps blocks."""

    name: str
    durable: bool
    """True: what `commit` returned survives power loss, and `commit` blocks for it."""

    @property
    def problem(self) -> str:
        """One sentence on why the tier takes no blocks at present; empty when it does."""
        ...

    def reserve(
        self, payload_bytes: int, symbol_bytes: int, count: int, pool: str = ""
    ) -> list[int]:
        """Takes up to `count` slots for payloads and symbols of at most these sizes: STAGING.

        Returns fewer, down to none, when the pool is full; never raises for that. Places come in
        ascending order and consecutive where they can. Raises TierError for an unknown pool.
        """
        ...

    def commit(self, blocks: Sequence[tuple[int, BlockHeader, bytes]]) -> list[int]:
        """Publishes written STAGING slots, in the order given; returns their generations.

        The caller passes (place, header, checksum from `write`), parents before children. Once
        this returns, `recover` after a crash finds the blocks. Raises TierError: then none of
        the blocks that follow the failed one is published, and the caller discards them all.
        """
        ...

    def discard(self, places: Sequence[int]) -> None:
        """Un-publishes blocks, or gives up STAGING slots: readers see generation 0; RESTING.

        Bytes stay untouched until the slot is freed, so that a reader under a lease can finish.
        A durable tier writes the removal down with its next `commit`.
        """
        ...

    def free(self, places: Sequence[int]) -> None:
        """Makes RESTING slots reusable; the caller knows that no lease or copy needs them.

        In a durable tier they come free with the `commit` that has made their removal durable;
        `commit([])` does nothing else.
        """
        ...

    def usage(self, pool: str | None = None) -> TierUsage:
        """Bytes of one pool, or of all. Raises TierError for an unknown pool."""
        ...

    def header(self, place: int) -> BlockHeader:
        """Header of a PUBLISHED slot; raises CorruptBlock if it is no longer what was written."""
        ...

    def checksum(self, place: int) -> bytes:
        """Payload checksum of a PUBLISHED slot; raises CorruptBlock as `header` does."""
        ...

    def generation(self, place: int) -> int:
        """Generation a slot is published under; 0 when it is not."""
        ...

    def generations(self, places: np.ndarray) -> np.ndarray:
        """Generations (uint64) of places (int64), as `generation` of each; -1 answers 0."""
        ...

    def next_generation(self) -> int:
        """Above every generation handed out so far: a clear mark for all that is there."""
        ...

    def recover(self) -> Iterator[StoredBlock]:
        """Blocks whose headers were found valid at open, in no particular order.

        Called once, before the first `reserve`. Payloads are not read: the caller verifies them.
        Torn headers are left out.
        """
        ...

    def adopt(self, place: int) -> None:
        """Keeps a block that `recover` gave: PUBLISHED again, under its old generation."""
        ...

    def recover_columns(self) -> StoredColumns:
        """What `recover` yields, all at once, for large tiers; instead of it."""
        ...

    def adopt_many(self, places: np.ndarray) -> None:
        """`adopt` of many places (int64)."""
        ...

    def finish_recovery(self) -> list[int]:
        """Un-publishes all that was not adopted; returns every slot now RESTING.

        The caller frees them one maximum lease later: readers from before may still be copying.
        """
        ...

    def report_bad(self, place: int) -> None:
        """What was read from `place` was not what had been written there; it is discarded next.

        A slot that is reported again and again is not used any more.
        """
        ...

    def drain_candidates(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> list[int]:
        """Published places to move away so that slots of this size can be made of their memory.

        Called after `reserve` came back empty. Until the memory is handed over, or
        `cancel_drain`, nothing new is placed there. Asking again gives what is still left.
        Empty: there is nothing to move (a slot is to be had, or nothing is worth moving).
        """
        ...

    def cancel_drain(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> None:
        """Gives up what `drain_candidates` began for this size; harmless if nothing was."""
        ...

    def check_integrity(self) -> None:
        """Asserts that the books agree with each other and with the medium; for tests and fsck."""
        ...

    def probe(self) -> None:
        """Looks at the medium again: what room it has, whether a problem is over. For workers."""
        ...

    def close(self, keep: bool = True) -> None:
        """Lets go of everything; with `keep=False` the stored bytes are deleted too.

        No worker may be inside. Views handed out stay readable until they are dropped.
        """
        ...

    def write(self, place: int, source: Source) -> bytes:
        """Copies a payload into a STAGING slot; returns the xxh3_128 of *the copy*.

        The source may change meanwhile: the checksum fits what was stored. The rest of the slot
        is zeroed. Raises TierError.
        """
        ...

    def write_many(self, items: Sequence[tuple[int, Source]]) -> list[bytes]:
        """`write` of several blocks; where slots are neighbours it may be one transfer.

        The sources of a durable tier must not change meanwhile.
        """
        ...

    def read(self, place: int, target: Target, length: int) -> None:
        """Copies the first `length` bytes of a slot out. Raises TierError."""
        ...

    def read_many(self, items: Sequence[tuple[int, Target]], length: int) -> list[bytes | None]:
        """Copies payloads of `length` bytes out; the xxh3_128 of each copy, None where it failed.

        Where slots are neighbours it may be one transfer. A target may be a whole slot, longer
        than `length`: what lies behind the payload is then zeroed or overwritten with padding.
        """
        ...

    def verify(self, place: int, length: int, checksum: bytes) -> bool:
        """Whether the stored payload still has this checksum."""
        ...

    def copy(self, source_place: int, target_place: int, length: int) -> bytes:
        """Copies a payload into a STAGING slot of the same tier, as `write` does."""
        ...


@runtime_checkable
class ResizableTier(Tier, Protocol):
    """A tier whose size can change while it serves.

    A smaller one owes memory: what is stored above the new size is dropped by the caller, what is
    in the way elsewhere moved, and `finish_resize` does the rest. Only the last call wears on the
    medium; whatever happens in between, all that is published stays so.
    """

    def begin_resize(self, byte_count: int) -> int:
        """Has another size from now on, for `reserve` and `usage`; answers with bytes of slots.

        Raises TierError, with the fix, where that cannot be; then nothing has changed.
        """
        ...

    @property
    def owed_bytes(self) -> int:
        """Memory that a smaller size has still to give up."""
        ...

    def choose_leaving(self, unmovable: np.ndarray) -> bool:
        """Chooses what memory to give up, again if it was chosen before; False: there is none.

        None in which one of the places `unmovable` (int64) lies. Nothing new is placed in it.
        """
        ...

    def is_leaving(self, places: np.ndarray) -> np.ndarray:
        """Which of these places (int64, -1 for none) have to be moved or dropped."""
        ...

    def reserve_for_move(self, payload_bytes: int, symbol_bytes: int, count: int) -> list[int]:
        """`reserve` for blocks that move: they may be above the size until the old slot is free."""
        ...

    def finish_resize(self) -> int:
        """For workers, when nothing is owed: brings the medium to the size. Raises TierError.

        Answers with the bytes of blocks that have to go first, and is to be called again; 0: done.
        """
        ...


@runtime_checkable
class AddressableTier(Tier, Protocol):
    """A tier whose slots are memory of this machine."""

    def view(self, place: int, length: int) -> memoryview:
        """The stored payload itself, read-only; what it shows after `free` is anything."""
        ...

    def target(self, place: int) -> np.ndarray:
        """All bytes (uint8) of a STAGING slot, for a worker to fill from another tier."""
        ...

    def shared_pools(self, tenant_pool: str) -> list[SharedPool]:
        """The pools that a client of a tenant with this pool may map; none if it cannot be shared.

        Raises TierError for an unknown pool.
        """
        ...


class DeviceMemory(Protocol):
    """A range of a GPU's memory as another process finds it."""

    @property
    def handle(self) -> bytes:
        """Opens the allocation that the range is in."""
        ...

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...


class DeviceStaging(Protocol):
    """A GPU's memory that one session sees; for workers."""

    length: int

    def share(self) -> DeviceMemory:
        """What the engine opens. Raises TierError where the memory cannot be shared."""
        ...

    def fill(self, blocks: Sequence[tuple[int, int]], length: int, source: Any = None) -> None:
        """Copies `length` bytes of each (place, offset in the staging), and waits.

        Of the tier that made the staging, or of `source`, one of its kind on another GPU.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class DeviceTier(Tier, Protocol):
    """A tier whose slots are memory of a GPU."""

    @property
    def device_uuid(self) -> str: ...

    def share_arena(self, pool: str = "") -> DeviceMemory:
        """A pool's memory; offsets of its places are `place_offset`. Raises TierError."""
        ...

    def open_staging(self, length: int) -> DeviceStaging:
        """Zeroed memory for one session. Raises TierError."""
        ...
