"""vLLM with the store answers as vLLM without it does; here with the real engine, on processors."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from daemons import DaemonProcess
from vllm_world import (
    LIMITS,
    Engine,
    ask,
    attached,
    cached,
    eventually,
    prompt,
    restored,
    settle,
    tiny_model,
    tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCK = 128


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("256MiB", LIMITS) as made:
        yield made


@pytest.fixture(scope="module")
def engine(model: Path, daemon: DaemonProcess) -> Iterator[Engine]:
    """An engine on a daemon that both outlive a test."""
    made = attached(model, daemon)
    yield made.wait()
    made.close()


def test_a_fresh_process_restores_every_full_block(
    model: Path, daemon: DaemonProcess, plain: Engine, engine: Engine
) -> None:
    """What one process stored, another finds: all full blocks before the last token."""
    asks = [ask(prompt(1, n), max_tokens=12) for n in (1100, 1025, 1024, 200)]
    want = [plain.run(each)[0]["tokens"] for each in asks]
    for each, right in zip(asks, want, strict=True):
        assert engine.call("forget_local")
        (outcome,) = engine.run(each)
        assert outcome["tokens"] == right
    settle(daemon)
    fresh = attached(model, daemon)
    for each, right in zip(asks, want, strict=True):
        fresh.call("forget_local")
        (outcome,) = fresh.run(each)
        assert outcome["tokens"] == right
        assert outcome["cached_tokens"] == (len(each["tokens"]) - 1) // BLOCK * BLOCK
    fresh.close()


def test_generated_tokens_are_stored_with_the_prompt(
    daemon: DaemonProcess, plain: Engine, engine: Engine
) -> None:
    """The next turn of a conversation finds the answer of the turn before, too."""
    first = ask(prompt(2, 300), max_tokens=150)
    (answer,) = engine.run(first)
    second = ask([*first["tokens"], *answer["tokens"], 5, 6, 7], max_tokens=12)
    (outcome,) = restored(engine, daemon, second)
    assert outcome["cached_tokens"] == 449 // BLOCK * BLOCK
    assert tokens(plain.run(first)) == [answer["tokens"]]
    assert tokens(plain.run(second)) == [outcome["tokens"]]


def test_salts_share_nothing(daemon: DaemonProcess, plain: Engine, engine: Engine) -> None:
    """A prompt under one salt is not found under another, and not under none."""
    text = prompt(3, 600)
    (right,) = tokens(plain.run(ask(text)))
    assert cached(restored(engine, daemon, ask(text, salt="a"))) == [0]
    assert cached(restored(engine, daemon, ask(text, salt="b"))) == [0]
    assert cached(restored(engine, daemon, ask(text))) == [0]
    for salt in ("a", "b", ""):
        (outcome,) = restored(engine, daemon, ask(text, salt=salt))
        assert (outcome["cached_tokens"], outcome["tokens"]) == (512, right)


def test_other_weights_share_nothing(
    model: Path, daemon: DaemonProcess, engine: Engine, tmp_path: Path
) -> None:
    """Weights are told apart by their bytes, whatever the model is called."""
    text = ask(prompt(4, 600))
    named = attached(model, daemon, settings={"model": "same"})
    other = attached(tiny_model(tmp_path, 1), daemon, settings={"model": "same"})
    (first,) = named.run(text)
    named.close()
    settle(daemon)
    (second,) = other.run(text)
    assert second["cached_tokens"] == 0
    assert second["tokens"] != first["tokens"]
    assert tokens(restored(other, daemon, text)) == [second["tokens"]]
    other.close()


def test_new_weights_leave_what_was_stored_to_others(
    daemon: DaemonProcess, plain: Engine, engine: Engine
) -> None:
    """After a reset of the connector's cache nothing old is found, until it is stored anew."""
    text = ask(prompt(5, 600))
    right = tokens(plain.run(text))
    engine.run(text)
    assert cached(restored(engine, daemon, text)) == [512]
    assert engine.call("new_weights")
    time.sleep(1.0)  # until both sides have attached again
    assert cached(engine.run(text)) == [0]
    outcomes = restored(engine, daemon, text)
    assert (cached(outcomes), tokens(outcomes)) == ([512], right)


def test_prompts_cancelled_at_any_step_leave_nothing_behind(
    daemon: DaemonProcess, plain: Engine, engine: Engine
) -> None:
    """Aborts while blocks load or are computed keep no block and no lease."""
    texts = [prompt(6, 1100), prompt(7, 1100)]
    right = tokens(plain.run(*map(ask, texts)))
    engine.run(*map(ask, texts))
    settle(daemon)
    assert engine.call("forget_local")
    before = engine.call("state")["free_blocks"]
    for steps in (1, 2, 3, 4, 6, 9):
        outcomes = engine.run(ask(texts[0], abort_after_steps=steps), ask(texts[1]))
        assert outcomes[1]["tokens"] == right[1]
        assert engine.call("forget_local")
    assert engine.run(ask(prompt(8, 20)))[0]["tokens"]  # steps that let loads end
    state = engine.call("state")
    assert (state["free_blocks"], state["requests"]) == (before, 0)
    assert eventually(lambda: daemon.status().lease_count == 0)


def test_preempted_requests_go_on_rightly(
    model: Path, daemon: DaemonProcess, plain: Engine
) -> None:
    """With a KV cache too small for all, what was preempted comes back from the store."""
    asks = [ask(prompt(20 + n, 500), max_tokens=200) for n in range(3)]
    right = [plain.run(each)[0]["tokens"] for each in asks]
    small = attached(model, daemon, num_gpu_blocks_override=13, max_model_len=1024)
    for _ in range(2):
        assert tokens(small.run(*asks)) == right
        settle(daemon)
    assert small.call("state")["preemptions"] > 0
    small.close()


def test_many_prompts_under_eviction(model: Path, plain: Engine) -> None:
    """Eight prompts at once, on a store that holds a third of them, are answered rightly."""
    asks = [ask(prompt(30 + n, 900), max_tokens=6) for n in range(8)]
    right = tokens(plain.run(*asks))
    with DaemonProcess("10MiB", LIMITS) as daemon:
        engine = attached(model, daemon)
        for _ in range(4):
            assert tokens(restored(engine, daemon, *asks)) == right
        assert daemon.status().block_count > 0
        engine.close()


def test_a_daemon_that_is_killed_costs_a_recompute(model: Path, plain: Engine) -> None:
    """Killed while prompts load and are computed, and between them: answers stay the same."""
    asks = [ask(prompt(40 + n, 1500), max_tokens=20) for n in range(4)]
    right = tokens(plain.run(*asks))
    with DaemonProcess("256MiB", LIMITS) as daemon:
        engine = attached(model, daemon)
        engine.run(*asks)
        for delay in (0.0, 0.02, 0.1, 0.3):
            settle(daemon)
            assert engine.call("forget_local")
            engine.begin(*asks)
            time.sleep(delay)
            daemon.kill()
            assert tokens(engine.end()) == right
            assert engine.call("forget_local")
            assert tokens(engine.run(*asks)) == right  # while it is gone
            daemon.start()
            assert eventually(lambda: daemon.status().session_count >= 3)
        outcomes = restored(engine, daemon, *asks)
        assert tokens(outcomes) == right
        assert min(cached(outcomes)) > 0
        engine.close()


def test_a_frozen_daemon_costs_one_call_s_limit(model: Path, plain: Engine) -> None:
    """While it is stopped prompts wait for one lookup at most; when it goes on it is used again."""
    asks = [ask(prompt(50 + n, 700), max_tokens=6) for n in range(6)]
    right = [plain.run(each)[0]["tokens"] for each in asks]
    with DaemonProcess("256MiB", LIMITS) as daemon:
        engine = attached(model, daemon)
        for each in asks:
            engine.run(each)
        settle(daemon)
        assert engine.call("forget_local")
        daemon.signal(signal.SIGSTOP)
        try:
            outcomes = [engine.run(each)[0] for each in asks]
        finally:
            daemon.signal(signal.SIGCONT)
        assert tokens(outcomes) == right
        assert cached(outcomes) == [0] * 6
        assert eventually(lambda: daemon.status().session_count >= 3)
        time.sleep(1.0)
        outcomes = restored(engine, daemon, *asks)
        assert tokens(outcomes) == right
        assert min(cached(outcomes)) > 0
        engine.close()


def damage(directory: Path) -> None:
    """Turns over a byte that is not zero in every 64 KiB of the large files of a directory."""
    for path in directory.rglob("*"):
        if not path.is_file() or path.stat().st_size < 32 << 20:
            continue
        data = np.memmap(path, np.uint8, "r+")
        for start in range(0, len(data), 64 << 10):
            places = np.flatnonzero(data[start : start + (64 << 10)])
            if len(places):
                data[start + places[len(places) // 2]] ^= 0xFF
        data.flush()


def test_a_corrupt_block_is_computed(model: Path, plain: Engine) -> None:
    """Bytes that changed in the pool while no daemon ran are found and never attended to."""
    text = ask(prompt(60, 1100))
    right = tokens(plain.run(text))
    with DaemonProcess("64MiB", LIMITS) as daemon:
        engine = attached(model, daemon)
        engine.run(text)
        settle(daemon)
        daemon.kill()
        damage(daemon.pool)
        daemon.start()
        assert eventually(lambda: daemon.status().session_count >= 3)
        outcomes = restored(engine, daemon, text)
        assert (tokens(outcomes), cached(outcomes)) == (right, [0])
        engine.close()
