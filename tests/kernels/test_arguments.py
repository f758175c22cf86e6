"""What attention refuses, and pools larger than 32-bit offsets reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attended import Case, compare, world

from kvstore.kernels.attention import merge_states, mla_decode, paged_decode, paged_extend
from kvstore.kernels.dispatch import target_of, uses_triton
from kvstore.kernels.formats import BlockLayout
from kvstore.kernels.plans import splits_for
from kvstore.kernels.views import layer_views

CASE = Case(lens=(20,), group=2)
Q = torch.randn(1, CASE.heads, CASE.head_dim).bfloat16()


def arguments(**changes: Any) -> dict[str, Any]:
    return world(CASE).arguments() | {"sm_scale": 0.1} | changes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sm_scale": 0.0}, "sm_scale is 0.0"),
        ({"window": -1}, "window is -1"),
        ({"softcap": -2.0}, "softcap is -2.0"),
        ({"sinks": torch.ones(3)}, "sinks have shape"),
        ({"kv_format": "int8_th"}, "k_pool is torch.bfloat16; int8_th needs torch.int8"),
        ({"kv_format": "int3"}, "kv_format is 'int3'"),
        ({"k_scale": torch.ones(4, 2)}, "goes with scales unless it is raw"),
        ({"seq_lens": torch.tensor([20])}, "seq_lens is torch.int64"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, "block_table is torch.int32 of"),
        ({"num_splits": 0}, "num_splits is 0"),
        ({"out": torch.empty(1, 4, 64)}, "out is torch.float32"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
    ],
)
def test_decode_refuses_what_does_not_fit(changes: dict[str, Any], says: str) -> None:
    """Each argument that is out of range or of another shape is named in the error."""
    with pytest.raises(ValueError, match=says):
        paged_decode(Q, **arguments(**changes))


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((4, 24, 2, 64), "block_size is 24"),
        ((4, 16, 2, 72), "head_dim is 72"),
        ((4, 16, 3, 64), "4 heads on 3 KV heads"),
    ],
)
def test_pools_of_other_shapes_are_refused(shape: tuple[int, ...], says: str) -> None:
    """Block sizes, head sizes and groups that no kernel is made for are named."""
    pool = torch.zeros(shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=says):
        paged_decode(Q, **arguments(k_pool=pool, v_pool=pool))


def test_other_operations_refuse_what_does_not_fit() -> None:
    """A window without causality, states without their sums, latents of another width."""
    cu_q = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="a window needs causal queries"):
        paged_extend(Q, **arguments(window=4), cu_q=cu_q, max_q=1, causal=False)
    with pytest.raises(ValueError, match="cu_q is torch"):
        paged_extend(Q, **arguments(), cu_q=torch.tensor([0, 1]), max_q=1)
    with pytest.raises(ValueError, match="out and lse have shapes"):
        merge_states(torch.ones(2, 1, 4, 64), torch.ones(2, 4))
    given = arguments()
    with pytest.raises(ValueError, match="the first two add up"):
        mla_decode(torch.ones(1, 4, 512), torch.ones(1, 4, 64), torch.ones(4, 16, 512),
                   given["block_table"], given["seq_lens"], sm_scale=0.1)  # fmt: skip


def test_the_backend_follows_the_device() -> None:
    """Without a word, GPUs take Triton and the CPU takes the reference."""
    assert uses_triton(None, torch.device("cuda", 0))
    assert not uses_triton(None, torch.device("cpu"))
    assert uses_triton("triton", torch.device("cpu"))
    assert target_of(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("programs", "tokens", "splits"),
    [(8, 131072, 32), (128, 32768, 2), (512, 8192, 1), (8, 300, 1)],
)
def test_splits_fill_the_chip_once(programs: int, tokens: int, splits: int) -> None:
    """As few splits as fill 264 places, and none shorter than 256 tokens."""
    assert splits_for(programs, 264, tokens) == splits


@pytest.mark.parametrize("kv_format", ["raw", "int8_th", "fp8_bh", "int4_kivi"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_blocks_are_read_in_wide_pieces(kv_format: str, head_dim: int, order: str) -> None:
    """Strides of the store's blocks are multiples of 16 words, which 16-byte loads depend on."""
    layout = BlockLayout(3, 8, head_dim, 16, order=order, kv_format=kv_format)
    pool = torch.zeros(2, layout.block_bytes, dtype=torch.uint8)
    views = layer_views(pool, layout, 1)
    for rows, scale in zip(views[:2], views[2:], strict=True):
        words = rows if kv_format == "raw" else rows.view(torch.int16)
        assert all(step % 16 == 0 for step in words.stride()[:3])
        assert (words.data_ptr() - pool.data_ptr()) % 16 == 0
        if kv_format == "int4_kivi":
            assert all(step % 16 == 0 for step in scale.stride()[:2])
            assert (scale.data_ptr() - pool.data_ptr()) % 16 == 0


@pytest.mark.parametrize("far", ["blocks", "heads"])
def test_pools_beyond_2_to_the_31_elements(far: str) -> None:
    """Offsets of blocks and heads are 64-bit: a pool of 4 GiB and more is attended to its end."""
    case = Case(lens=(33,), group=1)
    made = world(case)
    blocks, tokens, heads, width = made.views.k.shape
    rows = tokens * width
    step = 2**31 // (blocks - 1) + rows - (2**31 // (blocks - 1)) % rows
    strides = (step, width, rows, 1) if far == "blocks" else (rows, width, 2**31 + rows, 1)
    size = sum((n - 1) * by for n, by in zip(made.views.k.shape, strides, strict=True)) + 1
    assert size > 2**31
    shared = made.arguments() | {"sm_scale": 0.1}
    for name in ("k_pool", "v_pool"):  # untouched pages of these take no memory
        pool = torch.empty(size, dtype=torch.bfloat16).as_strided(made.views.k.shape, strides)
        pool.copy_(shared[name])
        shared[name] = pool
    q = torch.randn(1, heads, width).bfloat16()
    wanted = paged_decode(q.double(), **made.arguments(), sm_scale=0.1, backend="reference")
    compare(paged_decode(q, **shared, backend="triton"), wanted, "bfloat16")
