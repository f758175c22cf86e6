"""What the flows of the store share: the owner's state, handed in once by the composition root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvstore.core.clock import Clock
from kvstore.core.config import Config, LimitsSection
from kvstore.core.errors import CorruptBlock
from kvstore.core.recorder import Recorder
from kvstore.core.space import Space
from kvstore.mover import Mover
from kvstore.policies.index import Anchor, PrefixIndex, Span
from kvstore.policies.residency import Residency
from kvstore.store.costs import CostBook
from kvstore.store.decisions import DecisionLog
from kvstore.store.leases import LeaseTable
from kvstore.store.requests import RequestBook
from kvstore.store.retire import RetiredSlots
from kvstore.store.sessions import Engine, Session
from kvstore.tiers.base import AddressableTier, BlockHeader, Tier

if TYPE_CHECKING:
    from kvstore.store.hbm import HbmCopies

HOST, DISK = 0, 1
TIER_NAMES = ("host", "disk")
# A turn of the owner stays within 5 ms: a reserved block costs about 10 us, a walked one less.
RESERVE_BLOCKS_MAX = 256
SLICE_BLOCKS = 1024


class EventSink(Protocol):
    """Who hears what became readable in a tier and what left it; keys are packed block keys."""

    def stored(
        self, space: Space, medium: str, keys: bytes, parent_key: bytes, symbols: bytes
    ) -> None: ...

    def removed(self, space: Space, medium: str, keys: bytes) -> None: ...

    def cleared(self, space: Space, medium: str) -> None: ...


class SpaceRecord(Protocol):
    """Durable memory of spaces, their epochs and clears; each call is on disk when it returns.

    With `durable_slow` the calls that write are for one worker (RECORD_LINK), in order.
    """

    durable_slow: bool

    def remember(self, space: Space) -> None:
        """Writes a new space down, so that its blocks are known after a restart."""
        ...

    def epoch_of(self, space_id: bytes) -> int: ...

    def bump(self, space: Space) -> int:
        """The space's next epoch."""
        ...

    def mark_cleared(self, spaces: list[Space]) -> None:
        """Blocks of these spaces written until now never come back: of all of them, or none."""
        ...

    def save_costs(self, raw: bytes) -> None: ...

    def saved_costs(self) -> bytes | None:
        """What `save_costs` was last given, in an earlier life too."""
        ...


@dataclass(slots=True)
class Parts:
    """Everything a flow may touch. Only the owner thread does.

    `defer` runs a callable soon, after other work has had its turn: long flows go on through it a
    slice at a time. `next_id` numbers leases, reservations, pins and readers in one sequence.
    `unverified` holds places of adopted blocks not hashed again yet, `checksums` those of blocks
    written but not yet READY. `remains` are anchors on what a cut has left to a reader. `tiers` and
    `retired` are by tier number: HOST, and DISK where there is one. Copies in a GPU's memory are
    none of the index's: `hbm` knows them by the host places they were made of.
    """

    config: Config
    clock: Clock
    index: PrefixIndex
    residency: Residency
    tiers: tuple[Tier, ...]
    mover: Mover
    events: EventSink
    recorder: Recorder
    record: SpaceRecord
    defer: Callable[[Callable[[], None]], None]
    next_id: Callable[[], int]
    leases: LeaseTable
    retired: tuple[RetiredSlots, ...]
    decisions: DecisionLog
    spaces: dict[bytes, Space] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    engines: dict[Any, Engine] = field(default_factory=dict)
    unverified: set[int] = field(default_factory=set)
    checksums: dict[int, bytes] = field(default_factory=dict)
    readers: set[int] = field(default_factory=set)
    remains: dict[int, Anchor] = field(default_factory=dict)
    costs: CostBook = field(default_factory=CostBook)
    hbm: HbmCopies | None = None
    requests: RequestBook = field(init=False)
    draining: bool = False
    readopted_blocks: int = 0

    def __post_init__(self) -> None:
        self.requests = RequestBook(self.residency, self.clock.now)

    @property
    def host(self) -> AddressableTier:
        return cast("AddressableTier", self.tiers[HOST])

    @property
    def disk(self) -> Tier | None:
        return self.tiers[DISK] if len(self.tiers) > DISK else None

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the tiers there are, by number."""
        return TIER_NAMES[: len(self.tiers)]

    @property
    def limits(self) -> LimitsSection:
        return self.config.limits

    def pool_of(self, tenant: str) -> str:
        """Name of the host pool that a tenant's blocks lie in: its own if it is isolated."""
        return tenant if tenant in self.config.host_pools else ""

    def host_bytes(self, pool: str) -> int:
        """Size of a host pool, also while it still holds more."""
        return min(self.host.usage(pool).capacity_bytes, self.config.host_pools[pool])

    def known_tenants(self) -> set[str]:
        """Tenants that the configuration or a space names."""
        config = self.config
        named = {t.name for t in config.tenants} | {rule.tenant for rule in config.access}
        return named | {space.tenant for space in self.spaces.values()} | {"default"}

    def header(self, place: int) -> BlockHeader | None:
        """Header of a READY block's slot; None where it is no longer what was written."""
        try:
            return self.host.header(place)
        except CorruptBlock:
            return None

    def moving_path(self, anchor: Anchor, reader: int, first: int) -> list[Span]:
        """Blocks from `first` on that a reader's anchor covers, or what a cut has left of them."""
        if anchor.run is None:
            left = self.remains.get(reader)
            return [] if left is None else self.index.path(left, first)
        return self.index.path(anchor, first)

    def start_reading(self) -> int:
        """A new reader's id: anchors with it keep a block's slot while a worker reads it."""
        reader = self.next_id()
        self.readers.add(reader)
        return reader

    def stop_reading(self, reader: int) -> None:
        self.readers.discard(reader)
        remains = self.remains.pop(reader, None)
        if remains is not None:
            self.index.unanchor(remains)
        for retired in self.retired:
            retired.reader_ended(reader)
