"""Measured decisions in a real daemon: its own disk, its own clock, over the lane."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import SPEC, DaemonProcess, Tagged

from kvstore.client import KVClient

BLOCKS, PROMPTS = 64, 12  # 1 MiB a prompt


def prompt(number: int) -> list[int]:
    return [number * 100_000 + i for i in range(4 * BLOCKS)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon whose disk has every prompt, and whose memory has none."""
    config = f'tiers.disk.path = "{tmp_path / "disk"}"\ntiers.disk.size = "128MiB"\n'
    made, truth = DaemonProcess(config=config), Tagged()
    with made:
        with made.client(call_timeout_seconds=10.0) as client:
            space = client.attach(SPEC)
            for number in range(PROMPTS):
                result = space.put(prompt(number), truth.blocks(prompt(number)))
                assert result.stored == BLOCKS
            assert client.admin.flush().left_out_blocks == 0
        restart(made)
        yield made


def restart(daemon: DaemonProcess) -> None:
    """Stops it in order, takes its memory away, and starts it again."""
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    daemon.lose_memory()
    daemon.start()


def attach(client: KVClient, device: str) -> Any:
    return client.attach(SPEC, device=device, engine_build="engine 1")


def teach(space: Any, token_seconds: float) -> None:
    for i in range(40):
        new, cached = 128 << i % 5, 512 * (i % 7)
        space.report_step(1e-6 + token_seconds * new, [(new, cached)], clock="device")


def costs_of(client: KVClient) -> dict[str, Any]:
    return {f"{cost.subject} {cost.device}": cost for cost in client.status().costs}


def test_a_daemon_decides_by_what_it_measured(daemon: DaemonProcess) -> None:
    """What is read teaches the disk's cost; then an engine far faster than it recomputes, a slow
    one loads, and both are told why. A restart forgets nothing.
    """
    truth = Tagged()
    with daemon.client(call_timeout_seconds=10.0) as client:
        slow, fast = attach(client, "slow"), attach(client, "fast")
        for number in range(9):
            with slow.lookup(prompt(number)) as match:
                assert match.plan.kind == "load_all"
                assert "not measured yet" in match.reason
                assert truth.wrong(prompt(number), slow.restore(match)) == 0
        teach(slow, 1e-3)
        teach(fast, 1e-9)
        with fast.lookup(prompt(10), request_id="fast") as match:
            assert match.plan.kind == "recompute_all"
            assert (match.block_count, match.matched_tokens) == (0, 4 * BLOCKS)
            assert fast.restore(match) == []
        with slow.lookup(prompt(10), request_id="slow") as match:
            assert match.plan.kind == "load_all"
            assert match.plan.predicted_p50_seconds > 0
            assert truth.wrong(prompt(10), slow.restore(match)) == 0
        told = json.loads(client.admin.explain(request_id="slow").document)
        assert told["alternatives"][0]["kind"] == "load_all"
        assert told["links"]["disk>host"]["bytes_per_second"] > 1e6
        assert told["outcome"]["load_seconds"] > 0
        before = costs_of(client)
        assert before["m slow"].state == before["m fast"].state == "fitted"
    restart(daemon)
    with daemon.client(call_timeout_seconds=10.0) as client:
        slow, fast = attach(client, "slow"), attach(client, "fast")
        assert fast.lookup(prompt(11)).plan.kind == "recompute_all"
        with slow.lookup(prompt(11)) as match:
            assert match.plan.kind == "load_all"
            assert match.plan.predicted_p50_seconds is not None
        after = costs_of(client)
        for name, cost in before.items():
            assert after[name].sample_count >= cost.sample_count
    assert "Traceback" not in daemon.log
