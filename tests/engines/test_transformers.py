"""Hugging Face transformers: what is restored continues like what was computed, to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstore.client import LeaseLost, StoreUnavailable  # noqa: E402
from kvstore.core.errors import InvalidRequest, SpecError  # noqa: E402
from kvstore.core.plan import RECOMPUTE, PlanStep, RestorePlan  # noqa: E402
from kvstore.engines.transformers import (  # noqa: E402
    Prefill,
    cache_argument,
    prefill_with_store,
    spec_of,
)

BLOCK = 16


def tiny(**changes: Any) -> Any:
    """A random Llama of two layers; the same numbers for the same changes."""
    torch.manual_seed(changes.pop("seed", 0))
    sizes = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes})).eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Sums are the same for the same shapes only if as many threads make them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture
def space(served: Any, model: Any) -> Any:
    with served.client() as client:
        yield client.attach(spec_of(model, block_size=BLOCK), plan_shapes=("prefix", "split"))


def prompt(count: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (1, count), generator=generator)


def plain(model: Any, ids: Any, *cuts: int) -> tuple[Any, Any]:
    """(logits, cache) of a prompt computed without a store, in calls that end at `cuts`."""
    cache = transformers.DynamicCache(config=model.config)
    edges = [0, *cuts, ids.shape[1]]
    with torch.no_grad():
        for start, stop in itertools.pairwise(edges):
            output = model(
                ids[:, start:stop],
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(model): cache},
            )
    return output.logits[:, -1], cache


def is_same_cache(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for a, b in zip(one.layers, other.layers, strict=True)
    )


def test_a_restored_prefix_continues_to_the_bit(model: Any, space: Any) -> None:
    """Logits and cache equal those of computing the same tokens in the same calls, exactly."""
    ids = prompt(100)
    cold = prefill_with_store(model, ids, space)
    assert (cold.restored_tokens, cold.computed_tokens) == (0, 100)
    assert cold.put is not None
    assert cold.put.stored == 6
    warm = prefill_with_store(model, ids, space)
    assert (warm.restored_tokens, warm.computed_tokens) == (96, 4)
    assert warm.sources == {"host": 96}
    logits, cache = plain(model, ids, 96)
    assert torch.equal(warm.logits, logits)
    assert is_same_cache(warm.cache, cache)
    assert torch.allclose(warm.logits, cold.logits, atol=1e-5)
    for layer in warm.cache.layers:  # nothing is left of how it was filled
        assert vars(layer).keys() == vars(cache.layers[0]).keys()
        assert layer.keys.is_contiguous()


def test_another_prompt_shares_what_it_shares(model: Any, space: Any) -> None:
    """Blocks up to the first other token are restored, none beyond."""
    ids, other = prompt(100), prompt(100)
    other[0, 40] = (other[0, 40] + 1) % 128
    prefill_with_store(model, ids, space)
    found = prefill_with_store(model, other, space)
    assert (found.restored_tokens, found.computed_tokens) == (32, 68)
    assert torch.equal(found.logits, plain(model, other, 32)[0])


def test_the_last_token_is_computed(model: Any, space: Any) -> None:
    """A prompt of full blocks that is all stored still computes its last block for the logits."""
    ids = prompt(64)
    prefill_with_store(model, ids, space)
    warm = prefill_with_store(model, ids, space)
    assert (warm.restored_tokens, warm.computed_tokens) == (48, 16)


def test_chunks_store_and_restore_the_same(model: Any, space: Any) -> None:
    """Chunked prefill is restored by a call without chunks, and reports each of its calls."""
    ids = prompt(100, seed=3)
    steps: list[Any] = []
    space.report_step = lambda seconds, prefill, **more: steps.extend(prefill)
    prefill_with_store(model, ids, space, chunk_tokens=30)
    assert steps == [(30, 0), (30, 30), (30, 60), (10, 90)]
    warm = prefill_with_store(model, ids, space)
    assert torch.equal(warm.logits, plain(model, ids, 30, 60, 90, 96)[0]) or torch.allclose(
        warm.logits, plain(model, ids, 96)[0], atol=1e-5
    )


def test_generation_goes_on_from_it(model: Any, space: Any) -> None:
    """`generate` continues from a restored cache with the tokens that it gives without a store."""
    ids = prompt(80, seed=4)
    prefill_with_store(model, ids, space)
    warm = prefill_with_store(model, ids, space)
    warm.cache.crop(-1)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    cache = {cache_argument(model): warm.cache}
    restored = model.generate(ids, attention_mask=mask, **cache, **options)
    assert torch.equal(restored, model.generate(ids, attention_mask=mask, **options))


class Planned:
    """A space whose lookups answer with a plan of the test's."""

    def __init__(self, space: Any, steps: list[PlanStep]) -> None:
        self._space, self._steps = space, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    def lookup(self, *args: Any, **more: Any) -> Any:
        match = self._space.lookup(*args, **more)
        plan = RestorePlan("split", tuple(self._steps))
        loads = [s for s in self._steps if s.source != RECOMPUTE]
        match.__dict__["plan"] = plan
        match._ranges = tuple(
            range(s.first_token // BLOCK, (s.first_token + s.token_count) // BLOCK) for s in loads
        )
        return match


@pytest.mark.parametrize("middle", [(0, 32), (32, 32), (16, 64)])
def test_split_plans(model: Any, space: Any, middle: tuple[int, int]) -> None:
    """A plan that computes the middle of what is stored gives the logits of computing it all."""
    ids, (start, count) = prompt(100, seed=5), middle
    prefill_with_store(model, ids, space)
    steps = [PlanStep(0, start, "host")] if start else []
    steps += [
        PlanStep(start, count, RECOMPUTE),
        PlanStep(start + count, 96 - start - count, "host"),
        PlanStep(96, 4, RECOMPUTE),
    ]
    done = prefill_with_store(model, ids, Planned(space, steps))
    assert (done.restored_tokens, done.computed_tokens) == (96 - count, count + 4)
    assert torch.allclose(done.logits, plain(model, ids, 96)[0], atol=1e-5)
    assert done.cache.get_seq_length() == 100


def test_salts_and_revisions_keep_apart(served: Any, model: Any, space: Any) -> None:
    """Another salt, adapter or other weights never get these blocks."""
    ids = prompt(100, seed=6)
    prefill_with_store(model, ids, space, cache_salt="a")
    for apart in ({}, {"cache_salt": "b"}, {"cache_salt": "a", "adapter": "lora"}):
        assert prefill_with_store(model, ids, space, store=False, **apart).restored_tokens == 0
    other = tiny(seed=1)
    assert spec_of(other).revision != spec_of(model).revision
    with served.client() as client:
        theirs = client.attach(spec_of(other, block_size=BLOCK))
        assert prefill_with_store(other, ids, theirs, cache_salt="a").restored_tokens == 0


def test_the_identity_has_what_changes_the_numbers(model: Any) -> None:
    """Other rotary embeddings with the same weights are another space; another path is not."""
    scaled = tiny(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert spec_of(scaled, name="m").attention != spec_of(model, name="m").attention
    again = tiny()
    again.config._name_or_path = "elsewhere"
    assert spec_of(again, name="m") == spec_of(model, name="m")


class Failing:
    """A space of which one call raises."""

    def __init__(self, space: Any, name: str, error: Exception) -> None:
        self._space, self._name, self._error = space, name, error

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._space, name)

        def fail(*args: Any, **more: Any) -> Any:
            raise self._error

        return fail


@pytest.mark.parametrize("call", ["lookup", "restore", "put", "report_step", "report_transfer"])
@pytest.mark.parametrize("error", [StoreUnavailable("gone"), LeaseLost("late")])
def test_trouble_with_the_store_costs_time_only(
    model: Any, space: Any, call: str, error: Exception
) -> None:
    """Whatever call fails, the prompt is prefilled, and `problem` says what was of no use."""
    ids = prompt(100, seed=7)
    prefill_with_store(model, ids, space)
    done: Prefill = prefill_with_store(model, ids, Failing(space, call, error))
    assert done.restored_tokens + done.computed_tokens == 100
    assert torch.allclose(done.logits, plain(model, ids)[0], atol=1e-5)
    assert (str(error) in done.problem) == (call in ("lookup", "restore", "put"))


def test_a_daemon_that_died(served: Any, model: Any) -> None:
    """Without its daemon a prefill is one without a store."""
    ids = prompt(100, seed=8)
    with served.client() as client:
        space = client.attach(spec_of(model, block_size=BLOCK))
        prefill_with_store(model, ids, space)
        served.kill()
        done = prefill_with_store(model, ids, space)
    assert (done.restored_tokens, done.computed_tokens) == (0, 100)
    assert done.problem


def test_models_that_are_refused(model: Any, space: Any) -> None:
    """Caches that are no plain attention are named, as are a space of another model and bad ids."""
    sliding = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=32,
        )
    )
    with pytest.raises(SpecError, match="MistralForCausalLM keeps DynamicSlidingWindowLayer"):
        spec_of(sliding)
    with pytest.raises(SpecError, match="attach with spec_of"):
        prefill_with_store(tiny(num_key_value_heads=4), prompt(20), space)
    with pytest.raises(InvalidRequest, match=r"ids has shape \(2, 20\)"):
        prefill_with_store(model, prompt(40).reshape(2, 20), space)
    with pytest.raises(InvalidRequest, match="ids has shape"):
        prefill_with_store(model, prompt(0), space)


def test_half_precision(served: Any) -> None:
    """bfloat16 blocks come back to the bit."""
    model = tiny().to(torch.bfloat16)
    ids = prompt(70)
    with served.client() as client:
        space = client.attach(spec_of(model, block_size=BLOCK))
        prefill_with_store(model, ids, space)
        warm = prefill_with_store(model, ids, space)
    assert warm.restored_tokens == 64
    assert is_same_cache(warm.cache, plain(model, ids, 64)[1])
