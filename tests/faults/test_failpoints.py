"""Every step of put, demote, promote, evict, recover and bump dies, fails and waits in turn."""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from daemons import SPEC
from failpoints import DELAY, EIO, ENOSPC, KILL, POINTS, Failpoints, owner_of
from sick_disks import BLOCKS, SickDisk

from kvstore.client import KVClient
from kvstore.core.errors import KVStoreError

FEW = ["demote.durable", "evict.forgotten", "bump.one_written"]
FULL, EVICTED = 16, 4  # prompts of 1 MiB: so many fill the disk, so many a round puts then


class Rig(SickDisk):
    """A daemon with failpoints, and what it has said is durable."""

    def __init__(self, folder: Path, flow: str) -> None:
        small = flow == "evict"
        sizes = ("4MiB", "16MiB") if small else ("16MiB", "64MiB")
        super().__init__(folder / "disk", size=sizes[0], disk_size=sizes[1], shim=False)
        self.points = Failpoints(self.directory / "points")
        self.program, self.environ = self.points.program, self.points.environ
        self.numbers = itertools.count(1)
        self.durable: list[int] = []
        self.is_small = small
        self.on_disk_only: list[int] = []

    def put_and_flush(self, client: KVClient) -> None:
        """One more prompt; it counts as durable if Flush said so."""
        number = next(self.numbers)
        result = self.put(client, number)
        flushed = client.admin.flush()
        whole = result.stored + result.present == BLOCKS and not flushed.left_out_blocks
        if whole and not self.is_small:
            self.durable.append(number)

    def check(self, client: KVClient) -> None:
        """All that is durable is there; whatever is served is right (`found` makes sure).

        But for what is to be promoted later.
        """
        for number in set(self.durable) - set(self.on_disk_only):
            assert self.found(client, number) == BLOCKS, f"prompt {number}: {self.reason}"


def put(rig: Rig, client: KVClient) -> None:
    """Also the first of a space, which is written down before its blocks go to disk."""
    rig.put_and_flush(client)
    spec = msgspec.structs.replace(SPEC, model=f"other-{next(rig.numbers)}")
    client.attach(spec).put(list(range(16)), [bytes(spec.block_bytes)] * 4)
    client.admin.flush()


def demote(rig: Rig, client: KVClient) -> None:
    rig.put_and_flush(client)


def promote(rig: Rig, client: KVClient) -> None:
    if rig.on_disk_only:
        rig.found(client, rig.on_disk_only.pop())


def evict(rig: Rig, client: KVClient) -> None:
    for _ in range(EVICTED):
        rig.put_and_flush(client)


def bump(rig: Rig, client: KVClient) -> None:
    (space,) = client.status(with_spaces=True).spaces
    voided, rig.durable = rig.durable, []
    client.admin.bump_epoch(space.space_id)
    assert not any(rig.matched(client, number) for number in voided), "an old epoch is found"


FLOWS: dict[str, Callable[[Rig, KVClient], None]] = {
    "put": put, "demote": demote, "promote": promote, "evict": evict, "bump": bump,
}  # fmt: skip


def actions(name: str) -> list[int]:
    """Memory has no I/O errors: a step that only computes waits and dies."""
    return [DELAY, EIO, ENOSPC, KILL] if POINTS[name].does_io else [DELAY, KILL]


def prepared(rig: Rig, flow: str) -> None:
    """Blocks on disk and in host; for promote, prompts that are on disk alone."""
    with rig.calm_client() as client:
        for _ in range(6 if flow == "promote" else FULL if flow == "evict" else 1):
            rig.put_and_flush(client)
    if flow == "promote":
        rig.reboot()
        rig.on_disk_only = list(rig.durable)


@pytest.fixture
def rig(name: str, tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path, name.split(".")[0]) as made:
        prepared(made, name.split(".")[0])
        yield made


def run_flow(rig: Rig, name: str, action: int) -> None:
    """The flow with its step failing once, and what holds after."""
    act, pid = FLOWS[name.split(".")[0]], rig.pid
    rig.points.set(name, action)
    with rig.calm_client() as client:
        # A delay is no failure.
        with suppress(*() if action == DELAY else (KVStoreError,)):
            act(rig, client)
        hits = rig.points.hits(name)
        rig.points.clear(name)
        assert hits, f"{name} was not reached; nothing was tested"
        if action == KILL:
            assert rig.wait(20.0) == -signal.SIGKILL
            return
        assert rig.pid == pid
        assert rig.process is not None
        assert rig.process.poll() is None, rig.log
        assert rig.recovers(client), rig.problem(client)
        rig.check(client)
        goes_on(rig, client)


def goes_on(rig: Rig, client: KVClient) -> None:
    """Blocks are taken and made durable as ever."""
    number = next(rig.numbers)
    rig.stored(client, number)
    assert rig.found(client, number) == BLOCKS
    if not rig.is_small:
        assert rig.flushed(client)[1] == 0
        rig.durable.append(number)


def after_a_death(rig: Rig) -> None:
    """With all memory gone, too: what was durable is there."""
    rig.on_disk_only = []
    rig.lose_memory()
    rig.start()
    with rig.calm_client() as client:
        assert not rig.problem(client)
        rig.check(client)
        goes_on(rig, client)
        rig.check(client)


def run_recovery(rig: Rig, name: str, action: int) -> None:
    """A start whose step fails once, and the start after that."""
    rig.kill()
    rig.lose_memory()
    rig.points.set(name, action)
    if action == DELAY:
        rig.start()
    else:
        failed_start(rig, action)
    hits = rig.points.hits(name)
    rig.points.clear(name)
    assert hits, f"{name} was not reached; nothing was tested"
    if rig.process is not None and rig.process.poll() is None:
        rig.kill()
    after_a_death(rig)


def failed_start(rig: Rig, action: int) -> None:
    """It dies, leaves with one sentence, or serves what it can."""
    rig.log_path.unlink(missing_ok=True)
    process = rig.launch()
    for _ in range(600):
        if process.poll() is not None or "serving on" in rig.log:
            break
        time.sleep(0.05)
    if action == KILL:
        assert process.wait(20) == -signal.SIGKILL
        return
    assert "Traceback" not in rig.log, rig.log
    if process.poll() is not None:
        lines = [line for line in rig.log.splitlines() if line.startswith("kvstore: ")]
        assert len(lines) == 1, rig.log
        assert process.returncode in (1, 2)


def check_point(rig: Rig, name: str) -> None:
    for action in actions(name):
        if name.startswith("recover."):
            run_recovery(rig, name, action)
        else:
            run_flow(rig, name, action)
    if not name.startswith("recover."):
        after_a_death(rig)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", FEW)
def test_the_steps_that_matter_most(rig: Rig, name: str) -> None:
    """I4, I9, I12, I13, I14: where a step waits, fails with EIO or ENOSPC, or the daemon dies at
    it, what Flush said was durable is there, nothing served is wrong, and the daemon goes on."""
    check_point(rig, name)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [name for name in POINTS if name not in FEW])
def test_every_other_step(rig: Rig, name: str) -> None:
    """I4, I9, I12, I13, I14: the same at every other step."""
    check_point(rig, name)


def test_each_point_is_a_function_and_each_flow_has_points() -> None:
    """A step whose function was renamed is noticed here, not by a daemon that does not start."""
    for point in POINTS.values():
        owner, attribute = owner_of(point)
        assert callable(getattr(owner, attribute)), point
    flows = Counter(name.split(".")[0] for name in POINTS)
    assert set(flows) == {*FLOWS, "recover"}
    assert min(flows.values()) >= 6
