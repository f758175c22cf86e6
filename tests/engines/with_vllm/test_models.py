"""Kinds of models, names and engines of vLLM, each with the store as without it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from daemons import DaemonProcess
from vllm_world import (
    BATCH,
    LIMITS,
    Engine,
    ask,
    attached,
    cached,
    prompt,
    restored,
    settle,
    tell,
    tiny_adapter,
    tiny_model,
    tokens,
)

from kvstore.engines import smollm2
from kvstore.engines.vllm.process import VLLMProblem, interpreter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


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


HOST = Path(__file__).parents[2] / "support" / "vllm_gpu_host.py"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_way_to_a_gpu_gives_the_tokens_of_vllm_alone(family: str, tmp_path: Path) -> None:
    """A real vLLM whose memory counts as a GPU's answers as without a store, aborts included."""
    model = tiny_model(tmp_path, family=family)
    asks = [ask(prompt(60 + n, 1100), max_tokens=12) for n in range(3)]
    reference = Engine(model, None, **BATCH)
    with DaemonProcess("64MiB", LIMITS) as daemon:
        sides = tmp_path / "sides"
        engine = attached(
            model, daemon, host=(str(HOST),), settings={"gpu": "untested"},
            environ={"VLLM_GPU_HOST_SIDES": str(sides)},
        )  # fmt: skip
        right = tokens(reference.run(*asks))
        reference.close()
        assert tokens(engine.run(*asks)) == right
        for after in (0, 1, 2, 3):
            aborted = {**asks[1], "abort_after_steps": after} if after else asks[1]
            outcomes = restored(engine, daemon, asks[0], aborted, asks[2])
            kept = [0, 2] if after else [0, 1, 2]
            assert [tokens(outcomes)[n] for n in kept] == [right[n] for n in kept]
            assert [cached(outcomes)[n] for n in kept] == [1024] * len(kept)
        daemon.kill()
        assert engine.call("forget_local")
        assert tokens(engine.run(*asks)) == right
        assert engine.call("state")["requests"] == 0
        engine.close()
    assert len(sides.read_text().splitlines()) == 1


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


IMAGES = """
import json
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request
from kvstore.engines.vllm.prompts import Prompts

def digests(*images):
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=at, length=6))
        for at, name in images
    ]
    request = Request("r", [7] * 40, SamplingParams(), None, mm_features=features)
    return [(block, digest.hex()) for block, digest in prompts.of(request, 39).extra_digests]

prompts = Prompts("tokens", 8, 8)
print(json.dumps([digests(), digests((9, "a")), digests((9, "b")), digests((9, "a"), (30, "c"))]))
"""


def test_images_are_part_of_the_names_of_their_blocks() -> None:
    """The same placeholder tokens for another image name other blocks, and only those."""
    ran = subprocess.run(
        [interpreter(), "-c", IMAGES], capture_output=True, text=True, check=True, timeout=120
    )
    none, one, other, two = json.loads(ran.stdout.splitlines()[-1])
    assert none == []
    assert [block for block, _ in one] == [block for block, _ in other] == [1]
    assert one != other
    assert [block for block, _ in two] == [1, 3]
    assert two[0] == one[0]


EVENTS = """
import msgspec
from vllm.distributed.kv_events import KVEventBatch
from kvstore.engines.vllm.events import Cleared, Removed, Stored, as_vllm

told = [Stored("host", (b"a" * 32, b"b" * 32), b"p" * 32, 128), Removed("disk", (b"a" * 32,)),
        Cleared()]
batch = KVEventBatch(ts=1.0, events=[as_vllm(event) for event in told])
back = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
stored, removed, cleared = back.events
print(type(stored).__name__, len(stored.block_hashes), stored.medium, stored.block_size)
print(type(removed).__name__, removed.medium, removed.block_hashes == stored.block_hashes[:1])
print(type(cleared).__name__)
"""


def test_events_are_vllm_s_own() -> None:
    """What the connector tells of the store's blocks passes vLLM's own encoder and decoder."""
    ran = subprocess.run(
        [interpreter(), "-c", EVENTS], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.splitlines()[-3:] == [
        "BlockStored 2 CPU 128", "BlockRemoved STORAGE True", "AllBlocksCleared",
    ]  # fmt: skip
