"""Attention on restored blocks where they lie: a decoder equals transformers, without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from paged_world import Reads, daemon_with_disk, reboot, restored, sources
from tiny_llama import tiny_llama

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")

from kvstore.client import LeaseLost, Match, Space  # noqa: E402
from kvstore.core.errors import InvalidRequest, SpecError  # noqa: E402
from kvstore.engines.generating import prefill_alone  # noqa: E402
from kvstore.engines.in_place import (  # noqa: E402
    context_of,
    in_format,
    layout_of,
    quantising,
    restore_in_place,
)
from kvstore.engines.paged import PagedDecoder  # noqa: E402
from kvstore.engines.transformers import block_reader, cache_argument, spec_of  # noqa: E402

BLOCK, CONTEXT, NEW = 32, 96, 40
FORMATS = ("int8_th", "fp8_bh", "int4_kivi")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Other tests compute at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    """Weights so large that what a token attends to decides its logits."""
    return tiny_llama(head_dim=64, initializer_range=0.3)


@pytest.fixture(scope="module")
def prompt() -> Any:
    return torch.randint(0, 256, (CONTEXT + NEW,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def spec(model: Any) -> Any:
    return spec_of(model, block_size=BLOCK)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with daemon_with_disk(tmp_path_factory.mktemp("paged")) as made:
        yield made


def put(daemon: Any, model: Any, spec: Any, ids: Any) -> Any:
    """Stores a prompt's blocks as transformers computes them, by a client of its own."""
    cache = prefill_alone(model, ids).cache
    with daemon.client() as client:
        read = block_reader(cache, msgspec.structs.replace(spec, kv_format="raw", block_bytes=0))
        if spec.kv_format != "raw":
            read = quantising(read, spec)
        result = client.attach(spec).put(ids.numpy(), read)
        assert result.stored + result.present == len(ids) // spec.block_size
    return cache


def wanted(model: Any, ids: Any) -> Any:
    """Logits of transformers, of all tokens in one call."""
    with torch.no_grad():
        return model(ids[None]).logits[0]


def decoded(decoder: PagedDecoder, ids: Any) -> Any:
    """Logits of new tokens: some at once, some one by one, the rest at once."""
    cuts = [ids[:17], *ids[17:23].split(1), ids[23:]]
    return torch.cat([decoder.extend(cut) for cut in cuts])


def assert_close(found: Any, right: Any, tolerance: float = 1e-5) -> None:
    assert float((found - right).norm()) <= tolerance * float(right.norm())


def test_blocks_from_host_and_disk_are_attended_to_where_they_lie(
    daemon: Any, model: Any, spec: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one client, restored by another from host and from disk: attention reads the pool's
    own mapping, and logits are those of transformers."""
    from kvstore.kernels import attention

    put(daemon, model, spec, prompt[:CONTEXT])
    right = wanted(model, prompt)[CONTEXT:]
    for tier in ("host", "disk"):
        if tier == "disk":
            reboot(daemon)
        reads = Reads()
        with monkeypatch.context() as patched, restored(daemon, spec, prompt.numpy()) as made:
            for name in ("paged_extend", "paged_decode"):
                patched.setattr(attention, name, reads.record(getattr(attention, name)))
            context, match, views = made
            assert (context.tokens, sources(match)) == (CONTEXT, {tier})
            found = decoded(PagedDecoder(model, spec, context, room_tokens=NEW), prompt[CONTEXT:])
            (part,) = context.parts
            for view, place in zip(views, part.blocks.tolist(), strict=True):
                assert part.pool[place].data_ptr() == np.frombuffer(view, np.uint8).ctypes.data
            # Of each layer's calls the first is over the store's blocks, the second over its own.
            calls = 8 * model.config.num_hidden_layers
            assert reads.within(daemon.pool) == [True, False] * calls
        assert_close(found, right)


def test_the_context_decides(daemon: Any, model: Any, spec: Any, prompt: Any) -> None:
    """Of another prompt's blocks come other logits: what is compared above depends on them."""
    other = (prompt[:CONTEXT] + 1) % 256
    put(daemon, model, spec, other)
    with restored(daemon, spec, other.numpy()) as (context, *_):
        found = decoded(PagedDecoder(model, spec, context, room_tokens=NEW), prompt[CONTEXT:])
    right = wanted(model, prompt)[CONTEXT:]
    assert float((found - right).norm()) > 0.1 * float(right.norm())


@pytest.mark.parametrize("kv_format", FORMATS)
def test_quantised_blocks_are_attended_to_where_they_lie(
    daemon: Any, model: Any, spec: Any, prompt: Any, kv_format: str
) -> None:
    """Logits over a quantised context are those of transformers over what it dequantises to."""
    from kvstore.kernels.quantize import dequantize_blocks

    packed = in_format(spec, kv_format)
    put(daemon, model, packed, prompt[:CONTEXT])
    with restored(daemon, packed, prompt.numpy()) as (context, _, views):
        assert context.tokens == CONTEXT
        found = decoded(PagedDecoder(model, spec, context, room_tokens=NEW), prompt[CONTEXT:])
        codes = torch.tensor(np.stack([np.frombuffer(view, np.uint8) for view in views]))
    raw = torch.zeros((len(views), spec.block_bytes), dtype=torch.uint8)
    dequantize_blocks(codes, raw, layout_of(packed))
    assert_close(found, continued(model, spec, raw, prompt[CONTEXT:]))
    exact = wanted(model, prompt)[CONTEXT:]
    assert float((found - exact).norm()) > 1e-4 * float(exact.norm())


def continued(model: Any, spec: Any, raw: Any, ids: Any) -> Any:
    """Logits of transformers going on from blocks [layer, k/v, head, token, dim]."""
    shape = (spec.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
    blocks = raw.view(torch.float32).view(-1, *shape)
    whole = blocks.movedim(0, 3).flatten(3, 4)
    cache = transformers.DynamicCache(config=model.config)
    for number, (keys, values) in enumerate(whole):
        cache.update(keys[None], values[None], number)
    with torch.no_grad():
        return model(ids[None], **{cache_argument(model): cache}).logits[0]


@pytest.mark.parametrize(
    ("dtype", "layout", "block_size", "tolerance"),
    [
        ("float32", "LKNHD", 16, 1e-5),
        ("float16", "LKHND", 64, 5e-3),
        ("bfloat16", "LKNHD", 32, 4e-2),
    ],
)
def test_what_a_decoder_computed_is_stored_and_gone_on_from(
    daemon: Any, prompt: Any, dtype: str, layout: str, block_size: int, tolerance: float
) -> None:
    """Pages of a decoder are blocks of the store: put as they are, another goes on from them, and
    a third from what both put."""
    model = tiny_llama(head_dim=64, initializer_range=0.3, seed=2).to(getattr(torch, dtype))
    spec = msgspec.structs.replace(spec_of(model, block_size=block_size), layout=layout)
    right = wanted(model, prompt)
    first = PagedDecoder(model, spec, room_tokens=CONTEXT)
    assert_close(first.extend(prompt[:CONTEXT]), right[:CONTEXT], tolerance)
    with daemon.client() as client:
        space = client.attach(spec)
        full = CONTEXT // block_size
        assert space.put(prompt[:CONTEXT].numpy(), first.block).stored == full
        with restored(daemon, spec, prompt.numpy()) as (context, *_):
            assert context.tokens == full * block_size
            second = PagedDecoder(model, spec, context, room_tokens=len(prompt))
            left = prompt[context.tokens :]
            assert_close(decoded(second, left), right[context.tokens :], tolerance)
            more = space.put(prompt.numpy(), second.block, first_block=full)
            assert more.stored == len(prompt) // block_size - full
        with restored(daemon, spec, prompt.numpy()) as (context, *_):
            assert context.tokens == len(prompt) // block_size * block_size
            third = PagedDecoder(model, spec, context, room_tokens=len(prompt))
            left = prompt[context.tokens :]
            assert_close(third.extend(left), right[context.tokens :], tolerance)


def test_copies_are_a_context_too(daemon: Any, model: Any, spec: Any, prompt: Any) -> None:
    """Views of copies, as a remote daemon's clients get them, and of single buffers work alike."""
    cache = put(daemon, model, spec, prompt[:CONTEXT])
    read = block_reader(cache, spec)
    copies = np.stack([np.frombuffer(read(n), np.uint8) for n in range(CONTEXT // BLOCK)])
    rows = [row.data.toreadonly() for row in copies]
    assert len(context_of(rows, spec).parts) == 1
    apart = [memoryview(np.ascontiguousarray(row).copy()).toreadonly() for row in copies]
    assert len(context_of(apart, spec).parts) == len(apart)
    right = wanted(model, prompt)[CONTEXT:]
    for views in (rows, apart, apart[::-1]):
        decoder = PagedDecoder(model, spec, context_of(views, spec), room_tokens=NEW)
        assert_close(decoded(decoder, prompt[CONTEXT:]), right)


def test_blocks_that_go_under_a_lease_are_noticed(
    daemon: Any, model: Any, spec: Any, prompt: Any
) -> None:
    """What was computed from blocks that were cleared meanwhile fails the match's check."""
    put(daemon, model, spec, prompt[:CONTEXT])
    with daemon.client() as client:
        space = client.attach(spec)
        with space.lookup(prompt.numpy()) as match:
            context = restore_in_place(space, match)
            match.check()
            client.admin.clear(all=True)
            PagedDecoder(model, spec, context, room_tokens=NEW).extend(prompt[CONTEXT:])
            with pytest.raises(LeaseLost):
                match.check()
        with space.lookup(prompt.numpy()) as nothing:
            assert restore_in_place(space, nothing).tokens == 0


def test_plans_with_gaps_are_refused(daemon: Any, model: Any, spec: Any, prompt: Any) -> None:
    """Blocks that do not begin at the first token are no context of a prompt."""
    put(daemon, model, spec, prompt[:CONTEXT])
    with daemon.client() as client:
        space: Space = client.attach(spec)
        match: Match = space.lookup(prompt.numpy(), local_tokens=BLOCK)
        with match, pytest.raises(InvalidRequest, match="look up without local_tokens"):
            restore_in_place(space, match)


def test_what_does_not_fit_is_named(model: Any, spec: Any, prompt: Any) -> None:
    """Opaque layouts, formats that a spec cannot have, blocks of other sizes or other models,
    other architectures and more tokens than there is room for are refused."""
    opaque = msgspec.structs.replace(spec, layout="pages", block_bytes=4096)
    with pytest.raises(SpecError, match="'pages' is opaque"):
        layout_of(opaque)
    with pytest.raises(SpecError, match="make the spec with in_format"):
        layout_of(msgspec.structs.replace(spec, kv_format="int8_th"))
    narrow = msgspec.structs.replace(spec, head_dim=24, block_bytes=0)
    with pytest.raises(SpecError, match="int4_kivi needs head_dim in sixteens"):
        in_format(narrow, "int4_kivi")
    with pytest.raises(SpecError, match="kv_format is 'int3'"):
        in_format(spec, "int3")
    assert in_format(in_format(spec, "fp8_bh"), "raw") == spec
    with pytest.raises(InvalidRequest, match="a view holds 10 bytes"):
        context_of([memoryview(bytes(10))], spec)
    with pytest.raises(SpecError, match="make it with spec_of"):
        PagedDecoder(model, narrow, room_tokens=NEW)
    other = msgspec.structs.replace(spec, block_size=16, block_bytes=0)
    context = context_of([memoryview(bytes(other.block_bytes))], other)
    with pytest.raises(SpecError, match="restore from a space of the same spec"):
        PagedDecoder(model, spec, context, room_tokens=NEW)
    context = context_of([memoryview(bytes(spec.block_bytes))], spec)
    with pytest.raises(SpecError, match="the context is on cpu, the model on meta"):
        PagedDecoder(tiny_llama(head_dim=64).to("meta"), spec, context, room_tokens=NEW)
    decoder = PagedDecoder(model, spec, room_tokens=NEW)
    for ids in (prompt[: NEW + 1], prompt[:0], prompt[None, :4]):
        with pytest.raises(InvalidRequest, match=f"0 of {NEW} tokens"):
            decoder.extend(ids)
    with pytest.raises(InvalidRequest, match="block 0 is not among the 0"):
        decoder.block(0)
    qwen = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip
    with pytest.raises(SpecError, match="Qwen2ForCausalLM is no Llama"):
        PagedDecoder(qwen, spec, room_tokens=NEW)
