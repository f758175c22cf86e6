"""A daemon whose host tier grows by SIGHUP while clients are attached, and is killed meanwhile."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from daemons import SPEC, DaemonProcess, Tagged, wait_until

MIB = 1 << 20
CONFIG = """
tiers.host.mlock = false
limits.lease_ttl_seconds = 1.0
limits.max_lease_ttl_seconds = 1.0
index.max_blocks = 100000
policy.shadows = ["lru"]
"""
BLOCKS = 64
"""Of each prompt: 1 MiB."""


class Sized(DaemonProcess):
    """A daemon with a host tier whose size and largest size are written anew."""

    def __init__(self, size: int, size_max: int) -> None:
        super().__init__()
        self.tagged = Tagged()
        self.write(size, size_max)

    def write(self, size: Any, size_max: Any) -> None:
        def text(value: Any) -> str:
            return f"{value}MiB" if isinstance(value, int) else str(value)

        self.size = text(size)
        self.configure(f'{CONFIG}tiers.host.size_max = "{text(size_max)}"')

    def reload(self, size: Any, size_max: Any, word: str) -> str:
        """Reloads with these, and waits for this word in the log; answers with what was said."""
        said = len(self.log)
        self.write(size, size_max)
        self.signal(signal.SIGHUP)
        wait_until(lambda: word in self.log[said:])
        return self.log[said:]

    @property
    def host(self) -> Any:
        return self.status().tiers["host"]

    @property
    def memory(self) -> int:
        return next(self.pool.glob("pool-*.data")).stat().st_blocks * 512

    def tokens(self, prompt: int) -> list[int]:
        return [prompt] * (BLOCKS * SPEC.block_size)

    def put(self, space: Any, prompts: range) -> None:
        for prompt in prompts:
            tokens = self.tokens(prompt)
            assert space.put(tokens, self.tagged.blocks(tokens)).stored == BLOCKS

    def read(self, space: Any, prompts: range) -> int:
        """How many of these are there whole; each byte that is there is the right one."""
        whole = 0
        for prompt in prompts:
            with space.lookup(self.tokens(prompt)) as match:
                target = np.empty((match.block_count, SPEC.block_bytes), np.uint8)
                space.restore_into(match, target)
                assert self.tagged.wrong(self.tokens(prompt), target) == 0
                whole += match.block_count == BLOCKS
        return whole


@pytest.fixture
def daemon() -> Iterator[Sized]:
    made = Sized(16, 128)
    yield made
    made.close()


def test_an_attached_client_reads_what_lies_in_the_part_that_grew(daemon: Sized) -> None:
    """Limits, status and figures follow, blocks stay, and nobody attaches again; made smaller, the
    memory goes back, and it may grow again."""
    daemon.start()
    with daemon.client() as client, daemon.client() as other:
        space, second = client.attach(SPEC), other.attach(SPEC)
        daemon.put(space, range(1, 15))
        assert daemon.memory == 16 * MIB
        said = daemon.reload(64, 128, "64MiB now")
        assert "tiers.host.size grows from 16MiB to 64MiB" in said
        assert daemon.memory == 64 * MIB
        assert daemon.host.capacity_bytes == daemon.host.prefaulted_bytes == 64 * MIB
        daemon.put(space, range(15, 59))
        assert daemon.read(second, range(1, 59)) == 58
        assert daemon.host.used_bytes == 58 * MIB
        daemon.reload(16, 128, "are reloaded (tiers.host.size)")
        wait_until(lambda: daemon.host.capacity_bytes == 16 * MIB)
        wait_until(lambda: daemon.memory <= 16 * MIB)
        daemon.reload(100, 128, "100MiB now")
        daemon.put(space, range(101, 171))
        assert daemon.read(second, range(101, 171)) == 70


@pytest.mark.long
def test_a_killed_daemon_has_the_grown_pool_again(daemon: Sized) -> None:
    """I10: at the grown size, at a smaller one, at one beyond the largest there was: blocks are
    taken back, and of those that do not fit any more the least worth go."""
    daemon.start()
    with daemon.client() as client:
        space = client.attach(SPEC)
        daemon.put(space, range(1, 11))
        daemon.reload(64, 128, "64MiB now")
        daemon.put(space, range(11, 51))
    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        assert daemon.host.capacity_bytes == 64 * MIB
        assert daemon.read(client.attach(SPEC), range(1, 51)) == 50
    daemon.kill()
    daemon.write(20, 128)
    daemon.start()
    wait_until(lambda: daemon.host.used_bytes <= 20 * MIB)
    wait_until(lambda: daemon.host.capacity_bytes == 20 * MIB)
    wait_until(lambda: daemon.memory <= 20 * MIB)
    with daemon.client() as client:
        assert daemon.read(client.attach(SPEC), range(1, 51)) >= 15
    daemon.kill()
    daemon.write(160, 256)
    daemon.start()
    with daemon.client() as client:
        space = client.attach(SPEC)
        assert daemon.host.capacity_bytes == 160 * MIB
        assert daemon.read(space, range(1, 51)) >= 15
        daemon.reload(200, 256, "200MiB now")
        daemon.put(space, range(201, 321))
        assert daemon.read(space, range(201, 321)) == 120


@pytest.mark.parametrize(
    "seconds", [0.08, *(pytest.param(s, marks=pytest.mark.long) for s in (0.0, 0.02, 0.3))]
)
def test_a_daemon_that_is_killed_while_it_grows(daemon: Sized, seconds: float) -> None:
    """I10, I14: it finds all its blocks again and has the size of its file, whichever that is then;
    what it had taken for the other one is returned."""
    daemon.write(16, 512)
    daemon.start()
    with daemon.client() as client:
        daemon.put(client.attach(SPEC), range(1, 13))
    said = len(daemon.log)
    daemon.write(512, 512)
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: "grows from" in daemon.log[said:])
    time.sleep(seconds)
    daemon.kill()
    size = 512 if seconds == 0.08 else 16
    daemon.write(size, 512)
    daemon.start()
    with daemon.client() as client:
        assert daemon.read(client.attach(SPEC), range(1, 13)) == 12
    assert daemon.host.capacity_bytes == size * MIB
    assert daemon.memory == size * MIB


def test_what_cannot_be_had_leaves_all_as_it_was(daemon: Sized) -> None:
    """A size that no memory or no largest size allows is refused in a sentence that names it."""
    daemon.start()
    with daemon.client() as client:
        space = client.attach(SPEC)
        daemon.put(space, range(1, 9))
        for size, size_max, word in [
            (129, 256, "a restart is needed for tiers.host.size, tiers.host.size_max"),
            (64, 32, "size_max is 32MiB, below tiers.host.size, 64MiB"),
            (32, "900TiB", "tiers.host.size_max is 900TiB; pass 32TiB or less"),
            ("20TiB", "20TiB", "but only"),
            ("-5MiB", 128, "tiers.host.size"),
            (32, "much", "tiers.host.size_max"),
            (32, "-1GiB", "tiers.host.size_max"),
        ]:
            said = daemon.reload(size, size_max, "reloaded")
            assert word in said, said
            assert daemon.host.capacity_bytes == 16 * MIB
            assert daemon.memory == 16 * MIB
        assert daemon.read(space, range(1, 9)) == 8
        assert "nothing has changed" in daemon.reload(16, 128, "reloaded")


def test_a_file_system_that_is_too_small(tmp_path: Any) -> None:
    """I14: in a memory file system of 32 MiB a tier of 16 does not grow to 64; it says so and goes
    on with all it had. The next start is refused likewise, and nothing is lost."""
    mounted = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True,
        check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    daemon = Sized(16, 128)
    try:
        place = tmp_path / "pool"
        daemon.config = daemon.config.replace(str(daemon.pool), str(place))
        daemon.write(16, 128)
        script = f'mount -t tmpfs -o size=32m,mode=700 none {tmp_path} && exec "$0" "$@"'
        daemon.program = ["unshare", "-m", "sh", "-c", script, *daemon.program]
        daemon.start()
        assert "can never grow that far" in daemon.log
        with daemon.client() as client:
            space = client.attach(SPEC)
            daemon.put(space, range(1, 9))
            said = daemon.reload(64, 128, "not reloaded")
            assert "the file system of" in said
            assert daemon.host.capacity_bytes == 16 * MIB
            assert daemon.read(space, range(1, 9)) == 8
            daemon.reload(24, 128, "24MiB now")
            daemon.put(space, range(9, 21))
            assert daemon.read(space, range(1, 21)) == 20
    finally:
        daemon.close()
