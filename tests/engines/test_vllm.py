"""vLLM with the store answers as vLLM without it does; here with the real engine, on processors."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemons import DaemonProcess
from vllm_world import Engine, ask, prompt, tell, tiny_adapter, tiny_model

from kvstore.engines import smollm2
from kvstore.engines.vllm.process import VLLMProblem

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LIMITS = "tiers.host.prefault = false\ntiers.host.mlock = false\n"
BATCH = {"max_num_batched_tokens": 512}  # prompts here are longer than a step computes
BLOCK = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Engine]:
    """vLLM without a store: what it answers is right."""
    engine = Engine(model, None, **BATCH)
    yield engine.wait()
    engine.close()


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


def attached(model: Path, daemon: DaemonProcess, **options: Any) -> Engine:
    settings = {"address": daemon.address, "retry_seconds": 0.2, **options.pop("settings", {})}
    return Engine(model, settings, **{**BATCH, **options})


def tokens(outcomes: list[dict[str, Any]]) -> list[list[int]]:
    return [outcome["tokens"] for outcome in outcomes]


def cached(outcomes: list[dict[str, Any]]) -> list[int]:
    return [outcome["cached_tokens"] for outcome in outcomes]


def settle(daemon: DaemonProcess) -> int:
    """Waits until no more blocks come in; answers with how many there are."""
    before, since = -1, time.monotonic()
    while (count := daemon.status().block_count) != before or time.monotonic() - since < 0.3:
        if count != before:
            before, since = count, time.monotonic()
        time.sleep(0.05)
    return count


def restored(engine: Engine, daemon: DaemonProcess, *asks: dict[str, Any]) -> list[dict[str, Any]]:
    """The outcomes once vLLM's own cache is empty and the daemon has taken everything in."""
    settle(daemon)
    assert engine.call("forget_local")
    return engine.run(*asks)


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


@pytest.mark.skipif(not smollm2.is_there(), reason="the model is made by: make smollm2")
def test_a_real_model_in_fresh_processes() -> None:
    """SmolLM2 answers the same when its prompt's KV comes from a process that is gone."""
    text = ask([1000 + (i * 7919) % 30000 for i in range(1100)], max_tokens=16)
    with DaemonProcess("512MiB", LIMITS) as daemon:
        seen = []
        for settings in (None, {"address": daemon.address}, {"address": daemon.address}):
            engine = Engine(smollm2.folder(), settings, max_num_batched_tokens=2048)
            engine.run(ask([7] * 200))  # the first steps of a process are slow
            (outcome,) = engine.run(text)
            seen.append(outcome)
            settle(daemon)
            engine.close()
        plain, cold, warm = seen
        ratio = warm["ttft_seconds"] / cold["ttft_seconds"]
        tell("smollm2", ttft_ratio=ratio, cached_tokens=warm["cached_tokens"])
        assert cold["tokens"] == warm["tokens"] == plain["tokens"]
        assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, 1024)


def test_ranks_restore_their_own_shards(model: Path, plain: Engine) -> None:
    """Two tensor-parallel ranks store and restore half of every block each, in one space."""
    text = ask(prompt(97, 1100), max_tokens=12)
    right = tokens(plain.run(text))
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with DaemonProcess("64MiB", LIMITS) as daemon:
        engine = attached(model, daemon, tensor_parallel_size=2, environ=unbound)
        assert tokens(engine.run(text)) == right
        outcomes = restored(engine, daemon, text)
        assert (tokens(outcomes), cached(outcomes)) == (right, [1024])
        assert (daemon.status().space_count, daemon.status().block_count) == (1, 8)
        engine.close()


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


def eventually(condition: Any, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


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


def test_external_hashes_name_blocks(model: Path, plain: Engine) -> None:
    """With vLLM's own hashes as names a fresh process finds as much; random seeds are refused."""
    text = ask(prompt(70, 1100))
    right = tokens(plain.run(text))
    external = {"settings": {"key_mode": "external"}}
    with DaemonProcess("64MiB", LIMITS) as daemon:
        first = attached(model, daemon, **external, prefix_caching_hash_algo="sha256_cbor")
        second = attached(model, daemon, **external, prefix_caching_hash_algo="sha256_cbor")
        refused = attached(model, daemon, **external, prefix_caching_hash_algo="xxhash_cbor")
        assert tokens(first.run(text)) == right
        first.close()
        settle(daemon)
        outcomes = second.run(text)
        assert (tokens(outcomes), cached(outcomes)) == (right, [1024])
        second.close()
        with pytest.raises(VLLMProblem, match="set PYTHONHASHSEED"):
            refused.wait()


def test_a_prompt_is_handed_over(model: Path, plain: Engine) -> None:
    """What a prefill engine computed, a decode engine goes on from; without it, it computes."""
    text, lost = ask(prompt(80, 1100), max_tokens=12), ask(prompt(81, 1100), max_tokens=12)
    right = tokens(plain.run(text)) + tokens(plain.run(lost))
    with DaemonProcess("64MiB", LIMITS) as daemon:
        prefill = attached(model, daemon, role="kv_producer")
        decode = attached(model, daemon, role="kv_consumer").wait()
        (given,) = prefill.run({**text, "max_tokens": 1, "params": {"do_remote_decode": True}})
        params = given["params"]
        assert params["do_remote_prefill"] is True
        # vLLM would report what the prefill engine had cached, and not what was restored here.
        del params["remote_prefill_cached_tokens"]
        outcomes = decode.run({**text, "params": params})
        assert (tokens(outcomes), cached(outcomes)) == (right[:1], [1024])
        prefill.begin({**lost, "max_tokens": 1, "params": {"do_remote_decode": True}})
        prefill.kill()
        outcomes = decode.run({**lost, "params": params})
        assert tokens(outcomes) == right[1:]
        decode.close()


def test_layers_with_sliding_windows_are_restored(tmp_path: Path) -> None:
    """Models whose layers attend to the last tokens only keep groups of blocks; all are stored."""
    hybrid = tiny_model(tmp_path, family="gemma3")
    asks = [ask(prompt(90 + n, 1100), max_tokens=12) for n in range(2)]
    reference = Engine(hybrid, None, **BATCH)
    with DaemonProcess("64MiB", LIMITS) as daemon:
        engine = attached(hybrid, daemon)
        right = tokens(reference.run(*asks))
        reference.close()
        assert tokens(engine.run(*asks)) == right
        outcomes = restored(engine, daemon, *asks)
        assert (tokens(outcomes), cached(outcomes)) == (right, [1024, 1024])
        engine.close()


def test_drafted_tokens_are_stored_once_they_are_accepted(model: Path, plain: Engine) -> None:
    """With speculative decoding the next turn is as right as without."""
    cycle = ask([*prompt(95, 40)] * 9, max_tokens=150)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    with DaemonProcess("64MiB", LIMITS) as daemon:
        engine = attached(model, daemon, speculative_config=drafts)
        (answer,) = engine.run(cycle)
        again = ask([*cycle["tokens"], *answer["tokens"], 9, 9, 9], max_tokens=12)
        (outcome,) = restored(engine, daemon, again)
        assert outcome["cached_tokens"] >= 384
        assert tokens(plain.run(again)) == [outcome["tokens"]]
        engine.close()


def test_adapters_share_nothing(model: Path, tmp_path: Path) -> None:
    """Adapters are told apart by their bytes, under one name, too, and from none."""
    paths = [str(tiny_adapter(tmp_path, seed)) for seed in (1, 2)]
    text = prompt(96, 600)
    asks = [ask(text), ask(text, lora=("one", 1, paths[0])), ask(text, lora=("one", 2, paths[1]))]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    reference = Engine(model, None, **BATCH, **options)
    with DaemonProcess("64MiB", LIMITS) as daemon:
        engine = attached(model, daemon, **options)
        right = [reference.run(each)[0]["tokens"] for each in asks]
        reference.close()
        assert len({tuple(each) for each in right}) == 3
        for each, answer in zip(asks, right, strict=True):
            outcomes = restored(engine, daemon, each)
            assert (tokens(outcomes), cached(outcomes)) == ([answer], [0])
        for each, answer in zip(asks, right, strict=True):
            outcomes = restored(engine, daemon, each)
            assert (tokens(outcomes), cached(outcomes)) == ([answer], [512])
        engine.close()
