"""An encrypted disk tier that is resized by SIGHUP: under load, with kills, while keys change."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from daemons import Tagged
from disk_world import directory_bytes
from key_ring import KeyRing
from resized import MIB, SPEC, Load, Resized, wait_until

FILLER = msgspec.structs.replace(SPEC, model="filler")
BLOCKS = 8


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys", Random(1))


@pytest.fixture
def daemon(tmp_path: Path, ring: KeyRing) -> Iterator[Resized]:
    made = Resized(tmp_path / "disk", f'tiers.disk.key_file = "{ring.path}"\n')
    yield made
    made.close()


def reboot(daemon: Resized) -> None:
    daemon.kill()
    daemon.lose_memory()
    daemon.start()


class Durable:
    """Prompts of 8 blocks that a Flush said were on disk, and that nothing may take from there.

    `scatter` puts others between them, and clears these: every segment keeps some blocks then, so
    that a smaller tier has to move them.
    """

    def __init__(self, daemon: Resized) -> None:
        self.daemon = daemon
        self.prompts: list[int] = []

    def scatter(self, count: int) -> None:
        with self.daemon.client(call_timeout_seconds=10.0) as client:
            kept, filler = client.attach(SPEC), client.attach(FILLER)
            first = len(self.prompts)
            for prompt in range(first, first + count):
                for space, spec in ((kept, SPEC), (filler, FILLER)):
                    tokens = self.tokens(prompt)
                    assert not space.put(tokens, Tagged(spec).blocks(tokens)).rejected
                if prompt % 8 == 7 or prompt == first + count - 1:
                    assert not client.admin.flush().left_out_blocks
            self.prompts += range(first, first + count)
            client.admin.clear(filler.space_id)

    def tokens(self, prompt: int) -> list[int]:
        return [100_000 + prompt] * (BLOCKS * SPEC.block_size)

    def check(self, may_miss: bool = False) -> None:
        """All of them are there, unless they may be gone, and every byte is right."""
        tagged = Tagged(SPEC)
        with self.daemon.client(call_timeout_seconds=10.0) as client:
            space = client.attach(SPEC)
            for prompt in self.prompts:
                with space.lookup(self.tokens(prompt)) as match:
                    is_whole = match.matched_tokens == BLOCKS * SPEC.block_size
                    assert is_whole or may_miss, f"{prompt} is lost"
                    assert tagged.wrong(self.tokens(prompt), space.restore(match)) == 0

    def are_sealed(self) -> bool:
        """Whether no file of the tier has bytes of a block or a block's key in clear."""
        raw = b"".join(
            path.read_bytes() for path in self.daemon.disk_path.rglob("*") if path.is_file()
        )
        tagged = Tagged(SPEC)
        return not any(
            part in raw
            for prompt in self.prompts
            for block, key in zip(
                tagged.blocks(self.tokens(prompt)), tagged.keys(self.tokens(prompt)), strict=True
            )
            for part in (block[:32], key)
        )


def settled(daemon: Resized, mebibytes: int, said: int) -> None:
    wait_until(lambda: f"disk tier is {mebibytes} MiB now" in daemon.log[said:], 60.0)
    assert daemon.tier.capacity_bytes <= mebibytes * MIB
    assert directory_bytes(daemon.disk_path) <= mebibytes * MIB


@pytest.mark.long
@pytest.mark.timeout(300)
def test_resizes_and_rotations_lose_nothing_that_fits(daemon: Resized, ring: KeyRing) -> None:
    """I9: sealed blocks move to fewer segments and back, some under a new key; each comes back
    after a reboot, and once no block needs the old key any more, without it."""
    daemon.start()
    durable = Durable(daemon)
    durable.scatter(24)
    for size, change in ((28, "smaller"), (64, "larger")):
        ring.rotate()
        said = len(daemon.log)
        assert "(tiers.disk.size, keys in tiers.disk.key_file)" in daemon.resize(size), change
        settled(daemon, size, said)
        reboot(daemon)
        durable.check()
        durable.scatter(4)
    said = len(daemon.log)
    daemon.resize(28)
    settled(daemon, 28, said)
    reboot(daemon)
    ring.rotate()
    daemon.resize(28)
    ring.rotate()
    said = daemon.log.rsplit("there are ", 1)[1].splitlines()[0]
    ring.keep_only(name.split()[-1] for name in said.split(","))
    reboot(daemon)
    durable.check()
    assert durable.are_sealed()


@pytest.mark.parametrize(
    ("wanted", "seed"),
    [(1, 1), pytest.param(3, 2, marks=pytest.mark.long)],
)
@pytest.mark.timeout(400)
def test_kills_while_sealed_blocks_move(
    daemon: Resized, ring: KeyRing, wanted: int, seed: int
) -> None:
    """I9, I11: after a kill in the middle of a resize a start with the larger size and changed
    keys finds every durable block in one place or the other, sealed, and each byte right. One
    with the smaller size has dropped what lay above it, as any such start does."""
    random, kills, in_the_middle = Random(seed), 0, 0
    durable = Durable(daemon)
    daemon.start()
    durable.scatter(20)
    while in_the_middle < wanted and kills < 8 * wanted:
        size = random.choice([16, 18, 20])
        daemon.write(size)
        if random.random() < 0.5:
            ring.change()
        said = len(daemon.log)
        daemon.signal(signal.SIGHUP)
        wait_until(lambda said=said: "reloaded (" in daemon.log[said:], 30.0)
        time.sleep(random.choice([0.0, 0.02, 0.05, 0.1]))
        daemon.kill()
        kills += 1
        is_cut = " MiB now" not in daemon.log[said:]
        in_the_middle += is_cut
        daemon.lose_memory()
        ring.change()
        size = 64 if is_cut else random.choice([size, 64])
        daemon.write(size)
        daemon.start()
        assert directory_bytes(daemon.disk_path) <= size * MIB
        assert daemon.tier.problem == ""
        durable.check()
        if size != 64:
            said = len(daemon.log)
            daemon.resize(64)
            settled(daemon, 64, said)
        if in_the_middle < wanted and len(durable.prompts) < 24:
            durable.scatter(2)
    daemon.write(16)
    daemon.signal(signal.SIGHUP)
    reboot(daemon)
    durable.check(may_miss=True)
    assert durable.are_sealed()
    assert "which is not there" not in daemon.log
    print(f"{in_the_middle} of {kills} kills in the middle, {dict(ring.changes)}")
    assert in_the_middle == wanted


@pytest.mark.long
@pytest.mark.timeout(200)
def test_resizes_of_a_sealed_disk_under_load(daemon: Resized, ring: KeyRing) -> None:
    """Shrinks below what is stored and grows, while a client writes and reads and keys change: no
    wrong byte; what is left is there after a reboot."""
    daemon.start()
    load = Load(daemon.address, 1)
    try:
        wait_until(lambda: daemon.tier.used_bytes > 40 * MIB, 60.0)
        for size in (24, 48, 20):
            ring.change()
            said = len(daemon.log)
            assert "tiers.disk.size" in daemon.resize(size)
            settled(daemon, size, said)
    finally:
        load.stop()
    assert not load.problems
    assert load.read_all(daemon) > 20
    with daemon.client() as client:
        client.admin.flush()
    reboot(daemon)
    assert load.read_all(daemon) > 10
    assert load.wrong == 0
    assert daemon.tier.problem == ""
