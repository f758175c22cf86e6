"""Restores from disk through the client: bytes come through the pools, or in messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemons import DaemonProcess, Tagged

from kvstore.client import LeaseLost, NotFound

HOST_BLOCKS = 256  # 4 MiB of 16 KiB each
CONFIG = """
[tiers.disk]
path = "{disk}"
size = "64MiB"
reserve = "1MiB"
endurance_dwpd = 0
admission = "all"
demote_watermark = 0.25
[limits]
leased_bytes_per_session = "1GiB"
leased_bytes_per_tenant = "1GiB"
"""


@pytest.fixture
def two_tiers(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon whose host pool has room for 256 blocks, over a disk with room for thousands."""
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    with DaemonProcess("4MiB", CONFIG.format(disk=disk)) as daemon:
        yield daemon


def prompt(number: int, blocks: int) -> list[int]:
    return list(range(number * 100_000, number * 100_000 + 4 * blocks))


def put(space: Any, tagged: Tagged, tokens: list[int]) -> None:
    result = space.put(tokens, tagged.blocks(tokens))
    assert not result.rejected, result


@pytest.mark.parametrize("how", ["views", "copies", "another host"])
def test_what_left_host_comes_back(two_tiers: DaemonProcess, how: str) -> None:
    """I1, I9: blocks that were written to disk and evicted are restored, right byte for byte."""
    tagged = Tagged()
    with two_tiers.client() as client:
        space = client.attach(tagged.spec)
        prompts = [prompt(i, 32) for i in range(24)]
        for tokens in prompts:
            put(space, tagged, tokens)
            client.admin.flush()
        for tokens in prompts:
            with space.lookup(tokens) as match:
                assert match.matched_tokens == len(tokens)
                if how == "views":
                    views = space.restore(match)
                    assert tagged.wrong(tokens, views) == 0
                    match.check()
                else:
                    if how == "another host":
                        match.attachment.pools.clear()
                    out = np.zeros((32, tagged.spec.block_bytes), np.uint8)
                    space.restore_into(match, out)
                    assert tagged.wrong(tokens, [row.tobytes() for row in out]) == 0
        sources = set()
        for tokens in prompts:
            with space.lookup(tokens) as match:
                sources |= {step.source for step in match.plan.steps}
        assert sources == {"host", "disk"}


def test_a_restore_larger_than_what_host_has_free(two_tiers: DaemonProcess) -> None:
    """A restore that finds no room beside what others lease is whole all the same."""
    tagged = Tagged()
    with two_tiers.client() as client, ExitStack() as held:
        space = client.attach(tagged.spec)
        long = prompt(99, 160)
        put(space, tagged, long)
        client.admin.flush()
        for i in range(7):
            put(space, tagged, prompt(i, 32))
            client.admin.flush()
        for i in range(5):
            match = held.enter_context(space.lookup(prompt(i, 32)))
            assert match.matched_tokens == 128
            space.restore(match)
        with space.lookup(long) as match:
            assert match.matched_tokens == 640
            assert tagged.wrong(long, space.restore(match)) == 0
            out = np.zeros((160, tagged.spec.block_bytes), np.uint8)
            space.restore_into(match, out)
            assert tagged.wrong(long, [row.tobytes() for row in out]) == 0


def test_a_drained_prefix_survives_an_empty_host(two_tiers: DaemonProcess) -> None:
    """I9: a stop that unlinks the host pool writes it to disk; the next daemon serves it."""
    tagged, tokens = Tagged(), prompt(1, 64)
    with two_tiers.client() as client:
        space = client.attach(tagged.spec)
        put(space, tagged, tokens)
        client.admin.drain(10.0, free=True)
    two_tiers.wait()
    two_tiers.start()
    with two_tiers.client() as client:
        space = client.attach(tagged.spec)
        with space.lookup(tokens) as match:
            assert match.matched_tokens == 256
            assert [step.source for step in match.plan.steps] == ["disk"]
            assert tagged.wrong(tokens, space.restore(match)) == 0


def test_blocks_cleared_before_their_restore_are_an_error(two_tiers: DaemonProcess) -> None:
    """What was cleared since the lookup is refused, and never comes as other bytes."""
    tagged, tokens = Tagged(), prompt(1, 64)
    with two_tiers.client() as client:
        space = client.attach(tagged.spec)
        put(space, tagged, tokens)
        client.admin.flush()
        match = space.lookup(tokens)
        client.admin.clear(space_id=space.space_id)
        with pytest.raises((LeaseLost, NotFound)):
            space.restore(match)
