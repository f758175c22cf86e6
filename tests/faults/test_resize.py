"""A daemon whose disk tier is resized by SIGHUP under load, and killed in the middle of that."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from disk_world import directory_bytes
from resized import MIB, Load, Resized, wait_until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Resized]:
    made = Resized(tmp_path / "disk")
    yield made
    made.close()


@pytest.fixture
def load(daemon: Resized) -> Iterator[Load]:
    daemon.start()
    made = Load(daemon.address, 1)
    yield made
    made.stop()
    assert not made.problems
    assert made.wrong == 0


def test_a_reload_under_load_resizes_the_disk(daemon: Resized, load: Load) -> None:
    """Shrinks and grows while a client writes and reads: no wrong byte, and space given back."""
    wait_until(lambda: daemon.tier.used_bytes > 40 * MIB, 60.0)
    for size in (24, 48, 20):
        assert "(tiers.disk.size)" in daemon.resize(size)
        wait_until(lambda size=size: f"disk tier is {size} MiB now" in daemon.log, 60.0)
        assert daemon.tier.capacity_bytes <= size * MIB
        assert directory_bytes(daemon.disk_path) <= size * MIB
    load.stop()
    assert load.read_all(daemon) > 20
    assert daemon.tier.problem == ""


@pytest.mark.parametrize(("wanted", "seed"), [(1, 1), pytest.param(4, 2, marks=pytest.mark.long)])
@pytest.mark.timeout(400)
def test_kills_in_the_middle_of_a_resize(
    daemon: Resized, load: Load, wanted: int, seed: int
) -> None:
    """I9, I11: a daemon that is killed while its disk shrinks or grows starts with either size,
    and nothing that it serves is wrong."""
    random, size, kills, in_the_middle = Random(seed), 64, 0, 0
    wait_until(lambda: daemon.tier.used_bytes > 40 * MIB, 60.0)
    while in_the_middle < wanted and kills < 12 * wanted:
        before, size = size, random.choice([s for s in (16, 32, 64, 96) if s != size])
        said = len(daemon.log)
        daemon.write(size)
        daemon.signal(signal.SIGHUP)
        wait_until(lambda said=said: "reloaded (" in daemon.log[said:], 30.0)
        time.sleep(random.choice([0.0, 0.0, 0.03, 0.06]))
        daemon.kill()
        kills += 1
        in_the_middle += " MiB now" not in daemon.log[said:]
        if random.random() < 0.7:
            daemon.lose_memory()
        size = random.choice([before, size])
        daemon.write(size)
        daemon.start()
        assert directory_bytes(daemon.disk_path) <= size * MIB
        assert daemon.tier.problem == ""
        time.sleep(random.uniform(0.2, 1.0))
    load.stop()
    assert load.read_all(daemon) > 10
    print(f"{in_the_middle} of {kills} kills in the middle, {load.right} prompts right")
    assert in_the_middle == wanted


def test_a_reload_names_what_cannot_be(daemon: Resized) -> None:
    """A size that the file system has no room for is refused in one sentence, and so are others."""
    daemon.start()
    for wrong, why in [
        ("8MiB", "pass 16MiB or more"), ("much", "tiers.disk.size"), ("900TiB", "the file system"),
    ]:  # fmt: skip
        said = len(daemon.log)
        daemon.write(wrong)
        daemon.signal(signal.SIGHUP)
        wait_until(lambda said=said: "not reloaded" in daemon.log[said:], 10.0)
        assert why in daemon.log[said:]
    assert daemon.tier.capacity_bytes > 60 * MIB
