"""`Desk` and `Engine`: a store on a clock that tests move, and who talks to it, no client between.

Every block has bytes of its own, so that a foreign, stale or torn one shows.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import xxhash

from kvstore.core.errors import NotFound
from kvstore.core.keys import chain_keys, pack_tokens, token_chain
from kvstore.core.plan import (
    BlockOutcome,
    CommitResult,
    CommitRun,
    FailedBlocks,
    LookupResult,
    Query,
    ReserveResult,
    ReuseHints,
)
from kvstore.core.spec import KVSpec, root_digest
from kvstore.store.sessions import Attachment, Identity, Session
from kvstore.testing import InProcessStore, ManualClock, SimulatedMover

# One block is 4 tokens and 4096 bytes, one slot.
SPEC = KVSpec(
    model="m", revision="r", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32",
    block_size=4,
)  # fmt: skip
STAGING_BYTES = 64 << 10
UNLIMITED = [
    f"{what}_bytes_per_{whom}"
    for what in ("leased", "pinned", "reserved")
    for whom in ("session", "tenant")
]


def payload(space_id: bytes, epoch: int, key: bytes, shard: int, size: int) -> np.ndarray:
    """Bytes that belong to one shard of one block of one epoch, and to nothing else."""
    seed = xxhash.xxh3_64_intdigest(
        space_id + epoch.to_bytes(8, "little") + key + shard.to_bytes(2, "little")
    )
    words = np.arange(-(-size // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ np.uint64(seed)).view(np.uint8)[:size]


LETTERS = {
    BlockOutcome.REJECTED: "-", BlockOutcome.WANTED: "W", BlockOutcome.PRESENT: "P",
    BlockOutcome.PENDING: "O", BlockOutcome.STORED: "S",
}  # fmt: skip


class Engine:
    """One attachment of one session: puts blocks with payloads of their own, checks what it gets.

    Outcomes come back as strings of one letter a block: W wanted, P present, O pending (others
    write it), S stored, - rejected.
    """

    def __init__(self, desk: Desk, session: Session, attachment: Attachment) -> None:
        self.desk, self.session, self.attachment = desk, session, attachment
        self.space = attachment.space

    # ---- Prompts ----

    def query(
        self, tokens: Any, adapter: str = "", salt: str = "", request_id: str = "",
        no_store: bool = False,
    ) -> Query:  # fmt: skip
        chain = token_chain(pack_tokens(tokens), self.space.block_size)
        return Query(chain, adapter, salt, request_id, ReuseHints(no_store=no_store))

    def keys(self, tokens: Any, adapter: str = "", salt: str = "") -> list[bytes]:
        raw, width = pack_tokens(tokens), 4 * self.space.block_size
        root = root_digest(self.space.id, adapter, salt)[:16]
        return chain_keys(root, [raw[i : i + width] for i in range(0, len(raw) - width + 1, width)])

    def payload(self, key: bytes, epoch: int | None = None) -> np.ndarray:
        space = self.space
        epoch = space.epoch if epoch is None else epoch
        return payload(space.id, epoch, key, self.attachment.shard, space.block_bytes)

    # ---- Calls ----

    def lookup(self, tokens: Any, local: int = 0, **query: Any) -> LookupResult:
        return self.desk.wait(
            self.desk.kv.lookup(self.attachment, self.query(tokens, **query), local)
        )

    def reserve(self, tokens: Any, first: int = 0, **query: Any) -> ReserveResult:
        return self.desk.wait(
            self.desk.kv.reserve(self.attachment, self.query(tokens, **query), first)
        )

    def run(self, keys: list[bytes], first: int, count: int, epoch: int | None = None) -> CommitRun:
        """Blocks [first, first + count) as a client would have laid them out in staging."""
        stride = self.space.slot_bytes
        staged = np.zeros((count, stride), np.uint8)
        for i in range(count):
            staged[i, : self.space.block_bytes] = self.payload(keys[first + i], epoch)
        return CommitRun(first, count, memoryview(staged.reshape(-1)).toreadonly(), stride)

    def commit_later(self, reservation_id: int, runs: list[CommitRun]) -> Any:
        return self.desk.kv.commit(self.session, reservation_id, runs)

    def commit(self, reservation_id: int, tokens: Any, first: int, count: int, **query: Any) -> str:
        run = self.run(self.keys(tokens, **query), first, count)
        return outcomes(self.desk.wait(self.commit_later(reservation_id, [run])))

    def put(self, tokens: Any, first: int = 0, **query: Any) -> str:
        """Reserves, commits what is wanted, and answers with what became of each block.

        Goes on window by window, as clients do, until one is refused.
        """
        letters = self.put_window(tokens, first, **query)
        total = len(tokens) // self.space.block_size
        while letters and "-" not in letters and first + len(letters) < total:
            letters += self.put_window(tokens, first + len(letters), **query)
        return letters

    def put_window(self, tokens: Any, first: int = 0, **query: Any) -> str:
        answer = self.reserve(tokens, first, **query)
        letters = list(letters_of(answer.outcomes))
        keys = self.keys(tokens, query.get("adapter", ""), query.get("salt", ""))
        runs = [
            self.run(keys, answer.first_block + i, 1)
            for i, letter in enumerate(letters)
            if letter == "W"
        ]
        try:
            later = self.commit_later(answer.reservation_id, runs) if runs else []
        except NotFound:  # the blocks it goes on from turned out to be corrupt
            return "".join(letters).replace("W", "-")
        for result in self.desk.wait(later):
            letters[result.first_block - answer.first_block] = letters_of(result.outcomes)
        return "".join(letters)

    def matched(self, tokens: Any, **query: Any) -> int:
        """Blocks that are found and right; the lease on them ends again."""
        found = self.lookup(tokens, **query)
        self.check(found, tokens, **query)
        if found.lease_id:
            self.release(found)
        return found.matched_tokens // self.space.block_size

    def restore(self, found: LookupResult, tokens: Any, **query: Any) -> tuple[int, list[str]]:
        """Restores all that was found: (blocks that came and are right, why others did not)."""
        answers: list[Any] = []
        done = self.desk.kv.restore(self.session, found.lease_id, 0, 0, answers.append)
        self.desk.wait(done)
        came, failed = 0, []
        for answer in answers:
            if isinstance(answer, FailedBlocks):
                failed += [answer.reason] * answer.block_count
            else:
                assert (answer.places >= 0).all()
                found = msgspec.structs.replace(found, slots=answer)
                came += self.check(found, tokens, **query)
        return came, failed

    def fetched(self, tokens: Any, **query: Any) -> int:
        """Blocks that are found, restored and right; the lease on them ends again."""
        found = self.lookup(tokens, **query)
        if not found.lease_id:
            return 0
        came, _ = self.restore(found, tokens, **query)
        self.release(found)
        return came

    def release(self, found: LookupResult) -> None:
        self.desk.kv.release(self.session, [found.lease_id])
        self.desk.store.drain()

    # ---- Truth ----

    def check(
        self, found: LookupResult, tokens: Any, epoch: int | None = None, is_lost: bool = False,
        **query: Any,
    ) -> int:  # fmt: skip
        """Every slot of an answer holds its own block's bytes; answers with how many there are.

        With `is_lost` the blocks are un-published, but their slots must not be reused yet.
        """
        query.pop("request_id", None)
        if found.slots is None:
            assert not found.lease_id
            return 0
        tier, keys = self.desk.store.tier, self.keys(tokens, **query)
        slots = found.slots
        for i, (place, generation) in enumerate(
            zip(slots.places.tolist(), slots.generations.tolist(), strict=True)
        ):
            if place < 0:
                continue  # on disk: a restore brings it
            now = tier.generation(place)
            assert now == (0 if is_lost else generation), "a leased slot changed"
            stored = np.frombuffer(tier.view(place, self.space.block_bytes), np.uint8)
            key = keys[slots.first_block + i]
            assert np.array_equal(stored, self.payload(key, epoch)), "foreign bytes"
        return len(slots.places)

    def is_intact(self, found: LookupResult) -> bool:
        """Whether the slots of an answer are still what the answer said."""
        assert found.slots is not None
        now = self.desk.store.tier.generations(found.slots.places)
        return bool((now == found.slots.generations).all())


class Desk:
    """An `InProcessStore` on a ManualClock, and what tests do with its `KVStore`."""

    def __init__(self, size: int | str = "1MiB", late: bool = False, **changes: Any) -> None:
        limits = dict.fromkeys(UNLIMITED, "1GiB")
        sections = changes.pop("sections", {})
        sections = {
            "index": {"max_blocks": 100_000},
            **sections,
            "limits": {**limits, **sections.get("limits", {})},
        }
        self.clock = ManualClock()
        seed = changes.pop("seed", 0)
        self.mover = SimulatedMover(Random(seed)) if late else None
        self.store = InProcessStore(
            size, clock=self.clock, mover=self.mover, sections=sections, **changes
        )
        self.notices: list[tuple[Session, str, Any]] = []

    @property
    def kv(self) -> Any:
        return self.store.kv

    def wait(self, value: Any) -> Any:
        return self.store.wait(value)

    def settle(self) -> None:
        self.store.settle()
        self.store.check_integrity()

    def advance(self, seconds: float) -> None:
        """Time passes, and every session says that it lives."""
        left = seconds
        while left > 0:
            step = min(left, 1.0)
            self.clock.advance(step)
            for session in list(self.kv.parts.sessions.values()):
                self.kv.touch(session)
            self.kv.tick()
            self.store.drain()
            left -= step

    def session(self, tenants: tuple[str, ...] = ("default",), role: str = "admin") -> Session:
        opened: Session = self.kv.open_session(
            Identity(uid=1), role, tenants, memoryview(bytearray(STAGING_BYTES)),
            notify=lambda kind, value: self.notices.append((opened, kind, value)),
        )  # fmt: skip
        return opened

    def engine(
        self, tenant: str = "default", shard: int = 0, engine_id: str = "",
        session: Session | None = None, **spec: Any,
    ) -> Engine:  # fmt: skip
        session = session or self.session((tenant,))
        made = self.kv.attach(
            session, msgspec.structs.replace(SPEC, block_bytes=0, **spec), tenant, shard,
            engine_id=engine_id,
        )  # fmt: skip
        return Engine(self, session, made)

    def usage(self) -> Any:
        return self.store.tier.usage()

    def leased_bytes(self) -> int:
        return int(self.kv.status().leased_bytes)


def letters_of(raw: bytes) -> str:
    return "".join(LETTERS[BlockOutcome(outcome)] for outcome in raw)


def outcomes(results: list[CommitResult]) -> str:
    return "".join(letters_of(result.outcomes) for result in results)
