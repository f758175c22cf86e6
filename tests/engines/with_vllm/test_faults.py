"""A thousand requests through a real vLLM while the daemon dies, freezes and comes back."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import DaemonProcess
from vllm_world import BATCH, LIMITS, Engine, ask, prompt, tell

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

REQUESTS = int(os.environ.get("KVSTORE_VLLM_REQUESTS", "1000"))
EXTRA_SECONDS_MAX = 0.05
LOOKUP_SECONDS = 0.1


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("128MiB", LIMITS) as made:
        yield made


@pytest.fixture
def engine(model: Path, daemon: DaemonProcess) -> Iterator[Engine]:
    made = Engine(model, {"address": daemon.address, "retry_seconds": 0.2}, **BATCH)
    yield made.wait()
    made.close()


class Trouble(threading.Thread):
    """Kills the daemon, or stops it for a while, again and again until told to end."""

    def __init__(self, daemon: DaemonProcess, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self._daemon, self._rng = daemon, rng
        self.over = threading.Event()
        self.kills = self.freezes = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.over.wait(self._rng.uniform(0.1, 1.2)):
                if self._rng.random() < 0.5:
                    self._daemon.kill()
                    self.kills += 1
                    self.over.wait(self._rng.uniform(0.0, 0.6))
                    self._daemon.start()
                else:
                    self._daemon.signal(signal.SIGSTOP)
                    self.freezes += 1
                    self.over.wait(self._rng.uniform(0.0, 1.2))
                    self._daemon.signal(signal.SIGCONT)
        except BaseException as error:
            self.error = error


def test_no_answer_is_wrong_and_none_hangs(
    plain: Engine, daemon: DaemonProcess, engine: Engine
) -> None:
    """A thousand requests with random kills and freezes: the answers of vLLM alone, all of them."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    heads = [prompt(1000 + n, 640) for n in range(4)]
    asks = [
        ask([*rng.choice(heads), *prompt(2000 + n, rng.randrange(1, 500))], max_tokens=4)
        for n in range(48)
    ]
    right = [plain.run(each)[0]["tokens"] for each in asks]
    trouble = Trouble(daemon, random.Random(seed + 1))
    trouble.start()
    done = wrong = hits = 0
    try:
        while done < REQUESTS:
            chosen = [rng.randrange(len(asks)) for _ in range(rng.randrange(1, 7))]
            if rng.random() < 0.7:
                assert engine.call("forget_local")
            outcomes = engine.run(*(asks[n] for n in chosen))
            wrong += sum(o["tokens"] != right[n] for o, n in zip(outcomes, chosen, strict=True))
            hits += sum(o["cached_tokens"] > 0 for o in outcomes)
            done += len(chosen)
    finally:
        trouble.over.set()
        trouble.join(120)
    assert trouble.error is None, trouble.error
    state = engine.call("state")
    tell("thousand", seed=seed, requests=done, wrong=wrong, hits=hits, kills=trouble.kills,
         freezes=trouble.freezes)  # fmt: skip
    assert (wrong, state["requests"]) == (0, 0)
    assert trouble.kills + trouble.freezes >= REQUESTS // 50
    assert hits > 0


def seconds(outcomes: list[dict[str, Any]]) -> float:
    return float(outcomes[0]["ttft_seconds"])


def in_turns(one: Engine, other: Engine, numbers: range) -> tuple[list[float], list[float]]:
    """Times to the first token of prompts never asked before, the same to both engines."""
    ones, others = [], []
    for n in numbers:
        given = ask(prompt(n, 300), max_tokens=1)
        pair = [(one, ones), (other, others)]
        for engine, times in pair if n % 2 else pair[::-1]:
            times.append(seconds(engine.run(given)))
    return ones, others


def test_a_dead_daemon_costs_little(plain: Engine, daemon: DaemonProcess, engine: Engine) -> None:
    """With the daemon gone a request takes at most 50 ms more, the first and the others."""
    in_turns(engine, plain, range(3000, 3010))
    daemon.kill()
    with_store, without = in_turns(engine, plain, range(3010, 3070))
    extra = statistics.median(with_store) - statistics.median(without)
    first = with_store[0] - without[0]
    tell("dead", extra_seconds=extra, first_extra_seconds=first)
    assert extra <= EXTRA_SECONDS_MAX
    daemon.start()


def test_a_frozen_daemon_costs_one_call(
    plain: Engine, daemon: DaemonProcess, engine: Engine
) -> None:
    """With the daemon stopped the first request waits for one call, the others for none."""
    in_turns(engine, plain, range(4000, 4010))
    daemon.signal(signal.SIGSTOP)
    try:
        with_store, without = in_turns(engine, plain, range(4010, 4050))
    finally:
        daemon.signal(signal.SIGCONT)
    later = statistics.median(with_store[1:]) - statistics.median(without[1:])
    first = with_store[0] - without[0]
    tell("frozen", first_extra_seconds=first, later_extra_seconds=later)
    assert later <= EXTRA_SECONDS_MAX
    assert first <= LOOKUP_SECONDS + 2 * EXTRA_SECONDS_MAX + max(without)


def test_nothing_is_leased_after_lookups_and_cancels(daemon: DaemonProcess, engine: Engine) -> None:
    """Requests that are aborted while they are looked up or loaded leave no lease."""
    asks = [ask(prompt(5000 + n, 1100), max_tokens=1) for n in range(6)]
    engine.run(*asks)
    time.sleep(1.0)
    for n in range(60):
        assert engine.call("forget_local")
        engine.run(*({**each, "abort_after_steps": 1 + n % 4} for each in asks))
    engine.run(ask(prompt(1, 20)))
    end = time.monotonic() + 10.0
    while daemon.status().lease_count and time.monotonic() < end:
        time.sleep(0.1)
    assert daemon.status().lease_count == 0
