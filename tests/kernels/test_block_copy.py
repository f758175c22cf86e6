"""Gather and scatter: exact against plain indexing and the reference, for engines' layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels import block_launch
from kvstore.kernels.block_copy import gather_blocks, scatter_blocks
from kvstore.kernels.engine_pool import EnginePool
from kvstore.kernels.formats import FORMATS, BlockLayout
from kvstore.kernels.jit.probe import probe_e4m3
from kvstore.kernels.quantize import dequantize_blocks, quantize_blocks
from kvstore.kernels.views import DTYPES, layer_views

KINDS = ("vllm", "vllm_blocks_first", "vllm_hnd", "vllm_packed", "sglang", "blocks", "latents")
PAGES, BLOCKS, COUNT = 9, 5, 3
UNTOUCHED = 0x55


def make_pool(kind: str, layout: BlockLayout, page: int, value: float | None = None) -> EnginePool:
    """An engine's pool of `PAGES` blocks' worth of pages, at random or filled with `value`."""
    heads, width, layers = layout.num_kv_heads, layout.head_dim, layout.num_layers
    pages = PAGES * layout.block_size // page
    shape = {
        "vllm": (2, pages, page, heads, width),
        "vllm_blocks_first": (pages, 2, page, heads, width),
        "vllm_hnd": (pages, 2, heads, page, width),
        "vllm_packed": (pages, heads, page, 2 * width),
        "sglang": (pages * page + 1, heads, width),
        "latents": (pages, page, width),
    }.get(kind, ())
    if kind == "blocks":
        raw = torch.zeros(pages, layout.raw.block_bytes, dtype=torch.uint8)
        raw.view(DTYPES[layout.dtype]).normal_() if value is None else raw.view(
            DTYPES[layout.dtype]
        ).fill_(value)
        return EnginePool.blocks(raw, layout.raw)
    count = 2 * layers if kind == "sglang" else layers
    tensors = [torch.randn(shape).to(DTYPES[layout.dtype]) for _ in range(count)]
    if value is not None:
        tensors = [tensor.fill_(value) for tensor in tensors]
    if kind == "sglang":
        return EnginePool.sglang(tensors[::2], tensors[1::2], page)
    if kind == "latents":
        return EnginePool.latents(tensors)
    if kind == "vllm_packed":
        return EnginePool.vllm_packed(tensors)
    return EnginePool.vllm(tensors, "HND" if "hnd" in kind else "NHD", int(kind != "vllm"))


def pages_of(layout: BlockLayout, page: int, seed: int = 0) -> torch.Tensor:
    per_block = layout.block_size // page
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(PAGES * per_block, generator=generator)[: COUNT * per_block]
    return drawn.to(torch.int32).view(COUNT, per_block)


SLOTS = torch.tensor([4, 0, 2], dtype=torch.int32)


def empty_store(layout: BlockLayout) -> torch.Tensor:
    return torch.full((BLOCKS, layout.block_bytes + 64), UNTOUCHED, dtype=torch.uint8)


def same_bits(a: EnginePool, b: EnginePool) -> bool:
    pairs = zip(a.tensors, b.tensors, strict=True)
    bits = {2: torch.int16, 4: torch.int32}[a.first.element_size()]
    return all(torch.equal(x.view(bits), y.view(bits)) for x, y in pairs)


def layout_for(kind: str, kv_format: str = "raw", width: int = 64, **more: object) -> BlockLayout:
    fields = {"block_size": 16, **more}
    if kind == "latents":
        fields |= {"kv_factor": 1, "num_kv_heads": 1}
    return BlockLayout(**({"num_layers": 2, "num_kv_heads": 2, "head_dim": width,
                           "kv_format": kv_format} | fields))  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_block_holds_its_pages_rows(kind: str, order: str) -> None:
    """Row (layer, K or V, token, head) of a block is that of the pages it was made of."""
    page = 4 if kind == "sglang" else 16
    layout = layout_for(kind, order=order)
    pool, pages = make_pool(kind, layout, page), pages_of(layout, page)
    store = empty_store(layout)
    gather_blocks(pool, pages, store, layout, slots=SLOTS, backend="triton")
    for layer in range(layout.num_layers):
        view = layer_views(store, layout, layer)
        for kv in range(layout.kv_factor):
            rows = view[kv]
            assert rows is not None
            tensor = pool.tensors[layer * layout.kv_factor + kv]
            for i in range(COUNT):
                for token in (0, 5, 15):
                    number = int(pages[i, token // page])
                    wanted = tensor[number, token % page]
                    assert torch.equal(rows[int(SLOTS[i]), token], wanted)
    assert bool((store[[1, 3]] == UNTOUCHED).all())
    assert bool((store[:, layout.block_bytes :] == UNTOUCHED).all())


def check_against_reference(
    kind: str, layout: BlockLayout, page: int, layers: range | None
) -> None:
    torch.manual_seed(layout.head_dim + page)
    pool, pages = make_pool(kind, layout, page), pages_of(layout, page)
    stores = {}
    for backend in ("triton", "reference"):
        stores[backend] = empty_store(layout)
        gather_blocks(
            pool, pages, stores[backend], layout, slots=SLOTS, layers=layers, backend=backend
        )
    assert torch.equal(stores["triton"], stores["reference"])
    pools = {}
    for backend in ("triton", "reference"):
        pools[backend] = make_pool(kind, layout, page, float("nan"))
        scatter_blocks(
            stores["triton"], pools[backend], pages, layout, slots=SLOTS, layers=layers,
            backend=backend,
        )  # fmt: skip
    assert same_bits(pools["triton"], pools["reference"])


@pytest.mark.parametrize(("kv_format", "kind", "width", "tokens", "dtype", "order"), [
    ("raw", "sglang", 80, 16, "float16", "HND"),
    ("raw", "vllm_packed", 96, 32, "float32", "NHD"),
    ("int8_th", "vllm", 128, 16, "bfloat16", "NHD"),
    ("int8_th", "latents", 96, 16, "float16", "NHD"),
    ("int8_th", "sglang", 80, 32, "float32", "HND"),
    ("fp8_bh", "vllm_hnd", 64, 16, "bfloat16", "NHD"),
    ("fp8_bh", "blocks", 256, 32, "float16", "HND"),
    ("fp8_bh", "vllm_packed", 80, 16, "float32", "NHD"),
    ("int4_kivi", "vllm", 64, 16, "bfloat16", "HND"),
    ("int4_kivi", "vllm_blocks_first", 128, 32, "bfloat16", "NHD"),
    ("int4_kivi", "sglang", 80, 16, "float32", "NHD"),
])  # fmt: skip
def test_kernels_equal_the_reference(
    kv_format: str, kind: str, width: int, tokens: int, dtype: str, order: str
) -> None:
    """Bytes of blocks, scales and untouched ones included, and rows that come back: bit for bit."""
    layout = layout_for(kind, kv_format, width, block_size=tokens, dtype=dtype, order=order)
    page = 1 if kind == "sglang" else tokens
    check_against_reference(kind, layout, page, range(1, 2) if tokens == 32 else None)


@pytest.mark.parametrize(("kind", "width", "tokens", "dtype", "order"), [
    ("vllm_hnd", 64, 16, "bfloat16", "NHD"),
    ("blocks", 128, 16, "float16", "HND"),
    ("sglang", 80, 16, "float32", "NHD"),
])  # fmt: skip
def test_chips_without_float8_make_the_same_codes(
    monkeypatch: pytest.MonkeyPatch, kind: str, width: int, tokens: int, dtype: str, order: str
) -> None:
    """e4m3 by arithmetic, as on sm_80: blocks and rows that come back are the reference's bits."""
    monkeypatch.setattr(block_launch, "WITHOUT_FLOAT8", ("cpu",))
    layout = layout_for(kind, "fp8_bh", width, block_size=tokens, dtype=dtype, order=order)
    check_against_reference(kind, layout, 1 if kind == "sglang" else tokens, None)


def test_e4m3_by_arithmetic_is_torchs() -> None:
    """Every code, the middle between any two and its neighbours, and far more: torch's own bits."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    bits = torch.cat([codes, middles]).view(torch.int32)
    near = torch.cat([bits, bits + 1, (bits - 1).clamp_min(0)]).view(torch.float32)
    spread = torch.logspace(-50, 12, 8192 - 2 * len(near), base=2.0)
    x = torch.cat([near, -near, spread])
    made, back = torch.empty(8192, dtype=torch.int8), torch.empty(8192)
    probe_e4m3[(1,)](x, made, back, N=8192)
    wanted = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    assert torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(back, wanted.float())


@pytest.mark.long
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_equal_the_reference_for_every_layout(
    kv_format: str, kind: str, dtype: str
) -> None:
    """Every format with every engine's layout, bit for bit."""
    if kind == "latents" and kv_format == "int4_kivi":
        pytest.skip("that format tells K from V")
    order = "HND" if dtype == "float16" else "NHD"
    layout = layout_for(kind, kv_format, 64, dtype=dtype, order=order)
    check_against_reference(kind, layout, 8 if kind == "sglang" else 16, None)


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(KINDS), order=st.sampled_from(["NHD", "HND"]),
    dtype=st.sampled_from(["bfloat16", "float32"]), seed=st.integers(0, 1 << 30),
    first=st.integers(0, 2), backend=st.sampled_from(["triton", "reference"]),
)  # fmt: skip
def test_scatter_undoes_gather(
    kind: str, order: str, dtype: str, seed: int, first: int, backend: str
) -> None:
    """What was gathered and scattered to other pages is what was there; nothing else changes."""
    torch.manual_seed(seed)
    page = 8 if kind == "sglang" else 16
    layout = layout_for(kind, order=order, dtype=dtype, num_layers=3)
    pool, target = make_pool(kind, layout, page), make_pool(kind, layout, page, 7.0)
    pages, others = pages_of(layout, page, seed), pages_of(layout, page, seed + 1)
    store, layers = empty_store(layout), range(first, 3)
    gather_blocks(pool, pages, store, layout, slots=SLOTS, layers=layers, backend=backend)
    scatter_blocks(store, target, others, layout, slots=SLOTS, layers=layers, backend=backend)
    for number, tensor in enumerate(target.tensors):
        expected = torch.full_like(tensor, 7.0)
        if number // layout.kv_factor in layers:
            expected[others.long()] = pool.tensors[number][pages.long()]
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("kv_format", FORMATS[1:])
def test_blocks_are_quantised_where_they_lie(kv_format: str) -> None:
    """Raw blocks become quantised ones and come back, in the slots that were named."""
    layout = layout_for("blocks", kv_format, dtype="float32")
    raw = torch.zeros(4, layout.raw.block_bytes, dtype=torch.uint8)
    raw.view(torch.float32).normal_()
    store, back = empty_store(layout), torch.zeros_like(raw)
    numbers = torch.tensor([3, 1], dtype=torch.int32)
    more = {"raw_slots": numbers, "slots": SLOTS[:2]}
    quantize_blocks(raw, store, layout, **more, backend="triton")
    dequantize_blocks(store, back, layout, **more, backend="triton")
    x, y = raw.view(torch.float32), back.view(torch.float32)
    error = float((x[[1, 3]] - y[[1, 3]]).norm() / x[[1, 3]].norm())
    assert error < {"int8_th": 0.01, "fp8_bh": 0.04, "int4_kivi": 0.11}[kv_format]
    assert not y[[0, 2]].any()
    assert bool((store[[1, 2, 3]] == UNTOUCHED).all())


def test_offsets_pass_four_gigabytes() -> None:
    """Blocks and pages beyond 2^31 elements and 2^32 bytes are found: offsets are 64 bits."""
    layout = BlockLayout(1, 1, 64, 16)
    far = (1 << 33) // (layout.block_bytes * 4)
    storage = torch.empty(1 << 33, dtype=torch.uint8)  # never touched but at its ends
    stride = layout.block_bytes * 4
    store = storage.as_strided((far, layout.block_bytes), (stride, 1))
    pool = make_pool("vllm", layout, 16)
    slots = torch.tensor([far - 1, 0], dtype=torch.int32)
    pages = torch.tensor([2, 5], dtype=torch.int32)
    gather_blocks(pool, pages, store, layout, slots=slots, backend="triton")
    wide = EnginePool.blocks(store, layout)
    target = torch.zeros(2, layout.block_bytes, dtype=torch.uint8)
    gather_blocks(wide, slots, target, layout, backend="triton")
    for i, page in enumerate(pages.tolist()):
        rows = target[i].view(torch.bfloat16).view(2, 16, 1, 64)
        assert torch.equal(rows, torch.stack([t[page] for t in pool.tensors]))


def test_arguments_that_do_not_fit_are_refused() -> None:
    """Shapes, dtypes and layers that cannot be meant are errors that name them."""
    layout = layout_for("vllm")
    pool, store, pages = make_pool("vllm", layout, 16), empty_store(layout), pages_of(layout, 16)
    with pytest.raises(ValueError, match=r"pages must be int32 \[n, 1\]"):
        gather_blocks(pool, pages.long(), store, layout)
    with pytest.raises(ValueError, match=r"slots must be int32 \[3\]"):
        gather_blocks(pool, pages, store, layout, slots=SLOTS[:2])
    with pytest.raises(ValueError, match="layers"):
        gather_blocks(pool, pages, store, layout, layers=range(1, 4))
    with pytest.raises(ValueError, match="num_layers is 2"):
        scatter_blocks(store, pool, pages, layout_for("vllm", num_layers=1))
    with pytest.raises(ValueError, match="float16"):
        scatter_blocks(store, pool, pages, layout_for("vllm", dtype="float16"))
    with pytest.raises(ValueError, match="backend is 'cuda'"):
        gather_blocks(pool, pages, store, layout, backend="cuda")
    with pytest.raises(ValueError, match="whole number of pages"):
        gather_blocks(
            make_pool("vllm", layout_for("vllm", block_size=32), 32), pages, store, layout
        )
    with pytest.raises(ValueError, match="strides differ"):
        EnginePool([torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8).transpose(1, 2).contiguous()
                    .transpose(1, 2)])  # fmt: skip
    with pytest.raises(ValueError, match="16 bytes"):
        EnginePool([torch.zeros(2, 4, 2, 6)])


def test_nothing_to_copy_is_no_error() -> None:
    """No pages, or no layers: nothing happens."""
    layout = layout_for("vllm")
    pool, store = make_pool("vllm", layout, 16), empty_store(layout)
    none = torch.zeros(0, 1, dtype=torch.int32)
    gather_blocks(pool, none, store, layout, backend="triton")
    gather_blocks(pool, pages_of(layout, 16), store, layout, layers=range(1, 1), backend="triton")
    assert bool((store == UNTOUCHED).all())
