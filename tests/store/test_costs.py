"""The cost book: what was measured is kept under its identity, and nothing else gets in."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from desk import Desk

from kvstore.core.errors import InvalidRequest, LimitReached
from kvstore.mover import COPY_LINK, READ_LINK, Job, Moved, run
from kvstore.policies.cost import CallCost, LinkIdentity
from kvstore.store.costs import MODELS_MAX, SAVE_SECONDS, CostBook, UnderWay
from kvstore.store.link_use import RECENT_SECONDS, LinkUse
from kvstore.store.measured import MeasuredMover
from kvstore.testing import ManualClock

TRUE = CallCost(5e-3, 20e-6, 1e-9)


def teach(desk: Desk, engine: Any, count: int = 40, cost: CallCost = TRUE) -> None:
    """Steps of many sizes and depths that take what `cost` says."""
    for i in range(count):
        new, cached = 128 << i % 5, 512 * (i % 7)
        seconds = cost.seconds(new, cached)
        desk.kv.costs.report_step(engine.attachment, seconds, [(new, cached)])


def model_of(desk: Desk, engine: Any) -> Any:
    return desk.kv.parts.costs.engine(engine.attachment.recompute_identity)


def test_steps_teach_the_model_of_their_engine(desk: Desk) -> None:
    """One model per model, revision, build, device and shard count; engines alike share it."""
    first, alike, other = desk.engine(), desk.engine(), desk.engine(revision="other")
    teach(desk, first)
    assert model_of(desk, first) is model_of(desk, alike)
    assert model_of(desk, first).state.name == "fitted"
    assert model_of(desk, first).seconds(4096) == pytest.approx(TRUE.seconds(4096, 0), rel=0.02)
    assert model_of(desk, other) is None


def test_models_survive_a_restart(make_desk: Callable[..., Desk], shm_directory: Any) -> None:
    """What was measured is there after a kill, as far as the last minute; another revision's is
    not taken for it.
    """
    desk = make_desk(directory=shm_directory)
    teach(desk, desk.engine())
    predicted = model_of(desk, desk.engine()).seconds(4096)
    desk.advance(SAVE_SECONDS + 1)
    desk.store.restart()
    assert model_of(desk, desk.engine()).seconds(4096) == pytest.approx(predicted)
    assert model_of(desk, desk.engine()).state.name == "fitted"
    assert model_of(desk, desk.engine(revision="other")) is None
    # A life in which the engine never turned up forgets nothing.
    teach(desk, desk.engine(revision="other"))
    desk.advance(SAVE_SECONDS + 1)
    desk.store.restart()
    assert model_of(desk, desk.engine()) is not None
    assert model_of(desk, desk.engine(revision="other")) is not None


def test_a_stop_saves_what_was_measured(make_desk: Callable[..., Desk], shm_directory: Any) -> None:
    """A daemon that stops in order loses nothing."""
    desk = make_desk(directory=shm_directory)
    teach(desk, desk.engine())
    desk.store.close()
    again = make_desk(directory=shm_directory)
    assert model_of(again, again.engine()) is not None


@pytest.mark.parametrize(
    "damage",
    [b"", b"[]", b"{}", b"\xff\x00", b'{"version":1,"models":[{}]}', b'{"version":2,"models":[]}'],
)
def test_damaged_costs_are_measured_anew(
    make_desk: Callable[..., Desk], shm_directory: Any, damage: bytes
) -> None:
    """A file that is no longer what was written leaves every cost unmeasured, with a note."""
    desk = make_desk(directory=shm_directory)
    (shm_directory / "costs.json").write_bytes(damage)
    desk.store.restart()
    assert model_of(desk, desk.engine()) is None
    assert any("damaged" in note for note in desk.kv.parts.costs.notes)


def test_a_damaged_model_is_measured_anew() -> None:
    """One model that does not add up costs the others nothing."""
    book = CostBook("/disk")
    for i in range(10):
        book.observe_transfer(book.read_link, 0.01, 1 << 20 + i % 3)
    damaged = CostBook("/disk")
    damaged.load(book.dump().replace(b'"weight":', b'"weight":-'))
    assert damaged.link(damaged.read_link) is None
    assert any("damaged" in note for note in damaged.notes)


def test_links_of_another_disk_are_not_believed() -> None:
    """A tier that moved to another directory has its disk measured anew, and says so."""
    book = CostBook("/old")
    for _ in range(10):
        book.observe_transfer(book.read_link, 0.01, 1 << 20)
        book.observe_transfer(LinkIdentity("host>hbm", "gpu"), 0.01, 1 << 20)
    moved = CostBook("/new")
    moved.load(book.dump())
    assert moved.link(moved.read_link) is None
    assert "'/old', not of '/new'" in moved.notes[0]
    upward = moved.upward("gpu")
    assert upward is not None
    assert upward.sample_count == 10


def test_garbage_changes_nothing(desk: Desk) -> None:
    """Steps and transfers that can be none leave what is predicted as it is."""
    engine = desk.engine()
    teach(desk, engine)
    report, transfer = desk.kv.costs.report_step, desk.kv.costs.report_transfer
    before = model_of(desk, engine).cost()
    for seconds in (0.0, 1e9):
        report(engine.attachment, seconds, [(100, 0)])
    report(engine.attachment, 1.0, [(1 << 63, 1 << 63)])
    report(engine.attachment, 1.0, [], 1 << 63, 1 << 63)
    report(engine.attachment, 1.0, [(100, 0)], (1 << 64) - 1)
    assert model_of(desk, engine).cost() == before
    transfer(engine.attachment, "host>hbm", 0, 1.0)
    transfer(engine.attachment, "host>hbm", 1 << 63, 1.0)
    transfer(engine.attachment, "host>hbm", 1 << 20, 0.0)
    assert desk.kv.parts.costs.upward("").sample_count == 0


def test_engines_report_links_of_their_own(desk: Desk) -> None:
    """No engine can say how fast the daemon's own links are."""
    engine = desk.engine()
    with pytest.raises(InvalidRequest, match="host>hbm"):
        desk.kv.costs.report_transfer(engine.attachment, "disk>host", 1 << 20, 1e-6)
    desk.kv.costs.report_transfer(engine.attachment, "hbm>host", 1 << 20, 1e-3)
    assert desk.kv.parts.costs.upward("") is None
    desk.kv.costs.report_transfer(engine.attachment, "host>hbm", 1 << 20, 1e-3)
    assert desk.kv.parts.costs.upward("").sample_count == 1


def test_the_book_is_bounded(desk: Desk) -> None:
    """Engines and links under ever new names are refused before they fill memory."""
    engine = desk.engine()
    for i in range(MODELS_MAX):
        desk.kv.costs.report_transfer(engine.attachment, f"host>{i}", 1 << 20, 1e-3)
    with pytest.raises(LimitReached, match="identities"):
        desk.kv.costs.report_transfer(engine.attachment, "host>more", 1 << 20, 1e-3)
    desk.kv.costs.report_transfer(engine.attachment, "host>0", 1 << 20, 1e-3)


class LateMover:
    """Ends a job when told to."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> bool:
        self.jobs.append(job)
        return len(self.jobs) < 3

    def bytes_ahead(self, link: str, tenant: Hashable, session: Hashable, byte_count: int) -> int:
        return sum(job.byte_count for job in self.jobs)

    def close(self) -> None:
        pass


def test_jobs_are_measured_with_their_wait() -> None:
    """A read counts from its submission until its owner hears of it; one that failed does not."""
    clock, late, book = ManualClock(), LateMover(), CostBook()
    mover, heard = MeasuredMover(late, clock, book), list[Moved]()
    for value in ([b"sum"], [b"sum", None]):
        job = Job(READ_LINK, "", 0, 100, lambda value=value: value, heard.append)
        assert mover.submit(job)
    seen: list[Any] = []
    book.observe_transfer = lambda *args: seen.append(args)  # type: ignore[method-assign]
    clock.advance(2.0)
    for job in late.jobs:
        job.done(run(job))
    assert seen == [(book.read_link, 2.0, 100, 0)]
    assert len(heard) == 2
    refused = Job(READ_LINK, "", 0, 100, lambda: None, heard.append)
    assert not mover.submit(refused)
    refused.done(Moved([b""], None, 1.0))
    assert len(seen) == 1
    clock.advance(9.0)
    mover.submit(Job(COPY_LINK, "", 0, 100, lambda: None, heard.append))
    late.jobs[-1].done(Moved(None, None, 1.0))
    assert len(seen) == 1


def test_a_transfer_that_hangs_counts_before_it_ends() -> None:
    """What a disk that got far slower costs is known while the first read still waits."""
    clock, late, book = ManualClock(), LateMover(), CostBook()
    mover = MeasuredMover(late, clock, book)
    for i in range(40):
        book.observe_transfer(book.read_link, 0.01 * (1 + i % 5), 100_000 * (1 + i % 5))
    model = book.link(book.read_link)
    assert model is not None
    believed, count = model.seconds(100_000), model.sample_count
    mover.submit(Job(READ_LINK, "", 0, 100_000, lambda: [b"sum"], lambda moved: None))
    clock.advance(0.02)
    book.look_at_overdue(clock.now())
    assert model.sample_count == count
    for _ in range(200):
        clock.advance(0.05)
        book.look_at_overdue(clock.now())
    assert count + 5 < model.sample_count < count + 20
    assert model.seconds(100_000) > 5 * believed
    late.jobs[0].done(run(late.jobs[0]))
    counted = model.sample_count
    clock.advance(100.0)
    book.look_at_overdue(clock.now())
    assert model.sample_count == counted


def test_parts_of_a_restore_count_until_the_model_is_fitted() -> None:
    """The first restores teach with each doubling of what came; later ones as a whole only."""
    book, part, size = CostBook(), 4_000_000, 64_000_000
    for _ in range(6):
        number = book.begin_transfer(UnderWay(book.read_link, 0.0, size, 0))
        for arrived in range(part, size, part):
            book.part_arrived(number, arrived * 1e-9, arrived, arrived + part)
        book.end_transfer(number, size * 1e-9, True)
    model = book.link(book.read_link)
    assert model is not None
    # 4, 8, 16, 32 and 64 MB of each, until there are enough.
    assert model.sample_count == 24 + 2
    assert model.state.name == "fitted"
    assert model.seconds(size) == pytest.approx(size * 1e-9, rel=0.1)


def test_parts_are_overdue_by_themselves() -> None:
    """A long restore that stops half way tells so before its whole time has passed."""
    book = CostBook()
    for i in range(40):
        book.observe_transfer(book.read_link, 0.01 * (1 + i % 8), 100_000 * (1 + i % 8))
    model = book.link(book.read_link)
    assert model is not None
    number = book.begin_transfer(UnderWay(book.read_link, 0.0, 10_000_000, 0))
    book.part_arrived(number, 0.01, 100_000, 200_000)
    book.look_at_overdue(0.03)
    assert model.sample_count == 40
    book.look_at_overdue(0.1)
    assert model.sample_count == 41
    book.end_transfer(number, 0.2, False)
    assert model.sample_count == 41


def test_only_what_waits_makes_a_link_dear() -> None:
    """One restore after the other costs nobody anything; those side by side do, for a while."""
    use = LinkUse(0.0)
    for second in range(100):
        use.change(second, 1)
        use.change(second + 0.99, -1)
    assert use.waiting(100.0) == 0.0
    use.change(100.0, 3)
    assert use.waiting(100.0) == 0.0
    assert use.waiting(200.0) == pytest.approx(2.0, rel=1e-3)
    use.change(200.0, -3)
    assert use.waiting(200.0 + RECENT_SECONDS) == pytest.approx(2.0 / math.e, rel=1e-3)
    assert use.waiting(150.0) <= 2.0  # a clock that steps back changes nothing


def test_copies_of_engines_make_their_link_dear(desk: Desk) -> None:
    """The busier an engine's reports say that its own link is, the more wait for it."""
    engine, book = desk.engine(), desk.kv.parts.costs
    link = LinkIdentity("host>hbm", "")
    assert book.waiting(link, desk.clock.now()) == 0.0
    seen = []
    for share in (0.1, 0.5, 0.8):
        for _ in range(40):
            desk.clock.advance(1.0)
            desk.kv.costs.report_transfer(engine.attachment, "host>hbm", 1 << 20, share)
        seen.append(book.waiting(link, desk.clock.now()))
    assert seen == sorted(seen)
    assert seen[1] == pytest.approx(0.5, rel=0.2)  # busy^2 / (1 - busy)
