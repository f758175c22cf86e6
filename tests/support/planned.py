"""A store of which costs are known: prompts on disk, measured engines and disks, plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from desk import Desk, Engine

from kvstore.core.plan import Ask, LookupResult
from kvstore.policies.cost import CallCost
from kvstore.testing import MemoryTier

BLOCK = 4096
BLOCKS = 40
TOKENS = list(range(4 * BLOCKS))
# A block is 4 tokens and 4 KiB: 160 tokens take 17 ms to compute, and as much at 40 MB/s.
CALL = CallCost(1e-3, 100e-6, 1e-9)
FAST, EVEN, SLOW = 1e9, 10e6, 0.5e6  # bytes a second of the disk


def disk_desk(make_desk: Callable[..., Desk], **changes: Any) -> Desk:
    """A store whose host tier holds 64 blocks, over a disk; copies end when told to."""
    section = {
        "demote_watermark": 0.5,
        "endurance_dwpd": 0.0,
        "admission": "all",
        "read_timeout_seconds": 60.0,
    }
    sections = changes.pop("sections", {})
    return make_desk(
        tier=MemoryTier(64 * BLOCK), disk=MemoryTier(4096 * BLOCK, "disk"), late=True,
        sections={**sections, "tiers": {"disk": section}}, **changes,
    )  # fmt: skip


def measure(
    desk: Desk, engine: Engine, disk_speed: float = EVEN, call: CallCost = CALL, steps: int = 40
) -> None:
    """The engine's steps and the disk's reads, as they would have been."""
    for i in range(steps):
        new, cached = 32 << i % 5, 512 * (i % 7)
        seconds = call.seconds(new, cached)
        desk.kv.costs.report_step(engine.attachment, seconds, [(new, cached)])
        size = BLOCK << i % 6
        book = desk.kv.parts.costs
        book.observe_transfer(book.read_link, 100e-6 + size / disk_speed, size)


def to_disk(desk: Desk, engine: Engine, tokens: list[int] = TOKENS, keep: int = 0) -> None:
    """Puts a prompt, and has its blocks but the first `keep` be on disk only."""
    assert "-" not in engine.put(tokens)
    desk.wait(desk.kv.flush())
    index, parts = desk.kv.parts.index, desk.kv.parts
    query = engine.query(tokens)
    root = index.find_root(engine.space, engine.attachment.root_digest("", ""))
    walk = index.walk(root, query.chain)
    walk.step(1024)
    for run, _, stop in walk.path:
        first = max(0, keep - run.first)
        if first < stop:
            places = index.clear_places(run, first, stop, 0)
            parts.residency.copy_lost(run)
            parts.retired[0].retire(places)
    desk.settle()


def ask(engine: Engine, tokens: list[int] = TOKENS, local: int = 0, **hints: Any) -> LookupResult:
    query = engine.query(tokens, request_id=hints.pop("request_id", ""))
    hints.setdefault("prompt_tokens", len(tokens) + 3)
    found: LookupResult = engine.desk.wait(
        engine.desk.kv.lookup(engine.attachment, query, local, Ask(**hints))
    )
    return found


def attach(desk: Desk, **attach: Any) -> Engine:
    session = desk.session()
    spec = desk.engine(session=session).space.spec
    return Engine(desk, session, desk.kv.attach(session, spec, "default", **attach))


def begin_restore(desk: Desk, engine: Engine, found: LookupResult) -> tuple[list[Any], Any]:
    answers: list[Any] = []
    done = desk.kv.restore(engine.session, found.lease_id, 0, 0, answers.append)
    desk.store.drain()
    return answers, done
