"""Attention on an engine's own pages, and on pools beyond 32-bit offsets, where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attended import Case, compare, world
from torch.nn.functional import scaled_dot_product_attention as attend

from kvstore.kernels.attention import mla_decode, paged_decode, paged_extend
from kvstore.kernels.engine_pool import EnginePool

PAGES, PAGE, HEADS, GROUP, WIDTH = 7, 16, 2, 3, 64
LENS = (17, 40)


def engine_pool(kind: str) -> EnginePool:
    """Random pages of two layers."""
    shape = {
        "vllm": (2, PAGES, PAGE, HEADS, WIDTH),
        "vllm_blocks_first": (PAGES, 2, PAGE, HEADS, WIDTH),
        "vllm_hnd": (PAGES, 2, HEADS, PAGE, WIDTH),
        "vllm_packed": (PAGES, HEADS, PAGE, 2 * WIDTH),
        "sglang": (PAGES * PAGE, HEADS, WIDTH),
    }[kind]
    tensors = [torch.randn(shape).bfloat16() for _ in range(4 if kind == "sglang" else 2)]
    if kind == "sglang":
        return EnginePool.sglang(tensors[::2], tensors[1::2], PAGE)
    if kind == "vllm_packed":
        return EnginePool.vllm_packed(tensors)
    return EnginePool.vllm(tensors, "HND" if "hnd" in kind else "NHD", int(kind != "vllm"))


@pytest.mark.parametrize(
    "kind",
    ["vllm_packed", *(pytest.param(kind, marks=pytest.mark.long) for kind in
     ("vllm", "vllm_blocks_first", "vllm_hnd", "sglang"))],
)  # fmt: skip
def test_an_engines_own_pages_are_attended_to(kind: str) -> None:
    """Decode and extend take pages of vLLM's and SGLang's pools by their strides."""
    torch.manual_seed(len(kind))
    pool = engine_pool(kind)
    assert pool.values is not None
    k, v = pool.keys[1], pool.values[1]
    table = torch.randperm(PAGES)[:6].view(2, 3).int()
    lens = torch.tensor(LENS, dtype=torch.int32)
    for row, n in enumerate(LENS):
        k[table[row, n // PAGE], n % PAGE :] = v[table[row, n // PAGE], n % PAGE :] = torch.nan
    shared: dict[str, Any] = {
        "k_pool": k, "v_pool": v, "block_table": table, "seq_lens": lens, "sm_scale": 0.125,
    }  # fmt: skip
    q = torch.randn(len(lens), HEADS * GROUP, WIDTH).bfloat16()
    dense = []
    for row, n in enumerate(LENS):
        sides = (side[table[row].long()].flatten(0, 1)[:n].double() for side in (k, v))
        heads_first = (side.transpose(0, 1) for side in sides)
        query = q[row].double()[:, None]
        dense.append(attend(query, *heads_first, scale=0.125, enable_gqa=True)[:, 0])
    out, _ = paged_decode(q, **shared, backend="triton", num_splits=2)
    assert float((out.double() - torch.stack(dense)).norm()) < 5e-3 * float(out.double().norm())
    edges = torch.tensor([0, 2, 5], dtype=torch.int32)
    more = torch.randn(5, HEADS * GROUP, WIDTH).bfloat16()
    found = paged_extend(more, **shared, cu_q=edges, max_q=3, backend="triton")
    wanted = paged_extend(more.double(), **shared, cu_q=edges, max_q=3, backend="reference")
    compare(found, wanted, "bfloat16")


def stretched(rows: torch.Tensor, far: str, least: int = 2**31) -> torch.Tensor:
    """The same rows with more than `least` elements from the first block, or head, to the last."""
    blocks, tokens, heads, width = rows.shape
    row = tokens * width
    strides = (row, width, least + row, 1)
    if far == "blocks":
        step = least // (blocks - 1)
        strides = (row * heads + step - step % row, width, row, 1)
    size = sum((n - 1) * by for n, by in zip(rows.shape, strides, strict=True)) + 1
    assert size > least
    # What is not written takes no memory.
    return torch.empty(size, dtype=rows.dtype).as_strided(rows.shape, strides).copy_(rows)


@pytest.mark.parametrize("far", ["blocks", pytest.param("heads", marks=pytest.mark.long)])
def test_extend_beyond_2_to_the_31_elements(far: str) -> None:
    """Offsets of blocks and heads are 64-bit in extend, too."""
    case = Case(lens=(33,), group=1, new=3)
    made = world(case)
    shared = made.arguments() | {"sm_scale": 0.1, "max_q": 3}
    shared["cu_q"] = torch.tensor([0, 3], dtype=torch.int32)
    q = torch.randn(3, case.heads, case.head_dim).bfloat16()
    wanted = paged_extend(q.double(), **shared, backend="reference")
    for name in ("k_pool", "v_pool"):
        shared[name] = stretched(shared[name], far)
    compare(paged_extend(q, **shared, backend="triton"), wanted, "bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("kv_format", ["int8_th", "fp8_bh", "int4_kivi"])
def test_quantised_pools_beyond_2_to_the_31_elements(kv_format: str, new: int) -> None:
    """Codes and scales of far blocks are found: their offsets are 64-bit, too."""
    case = Case(lens=(33,), group=1, kv_format=kv_format, new=new)
    made = world(case)
    shared = made.arguments() | {"sm_scale": 0.1}
    q = torch.randn(new, case.heads, case.head_dim).bfloat16()
    op = paged_decode
    if new > 1:
        shared |= {"max_q": new, "cu_q": torch.tensor([0, new], dtype=torch.int32)}
        op = paged_extend
    wanted = op(q.double(), **shared, backend="reference")
    for name in ("k_pool", "v_pool"):
        # Kernels read words of two bytes.
        far = stretched(shared[name].view(torch.uint8), "blocks", 2**32)
        shared[name] = far.view(shared[name].dtype)
    for name in ("k_scale", "v_scale"):
        scale = shared[name]
        step = 2**31 // (len(scale) - 1) + 16 - (2**31 // (len(scale) - 1)) % 16 + scale[0].numel()
        wide = torch.empty((len(scale) - 1) * step + scale[0].numel(), dtype=scale.dtype)
        inner = scale[0].contiguous().stride()
        shared[name] = wide.as_strided(scale.shape, (step, *inner)).copy_(scale)
    compare(op(q, **shared, backend="triton"), wanted, "bfloat16")


@pytest.mark.long
def test_latents_beyond_2_to_the_31_elements() -> None:
    """MLA latents of far blocks are found."""
    latents = torch.randn(4, 16, 576).bfloat16()
    table = torch.tensor([[3, 0, 2]], dtype=torch.int32)
    lens = torch.tensor([40], dtype=torch.int32)
    nope, rope = (torch.randn(1, 16, width).bfloat16() for width in (512, 64))
    wanted = mla_decode(
        nope.double(), rope.double(), latents, table, lens, sm_scale=0.06, backend="reference"
    )
    step = 2**31 // 3 + 576 - (2**31 // 3) % 576
    far = torch.empty(3 * step + 16 * 576, dtype=torch.bfloat16).as_strided(
        latents.shape, (step, 576, 1)
    )
    far.copy_(latents)
    assert 3 * far.stride(0) > 2**31
    found = mla_decode(nope, rope, far, table, lens, sm_scale=0.06, backend="triton")
    compare(found, wanted, "bfloat16")
