"""The reference against torch's own attention, and against the words of its documentation."""

from __future__ import annotations

import math

import pytest
import torch
from attended import Case, world
from torch.nn.functional import scaled_dot_product_attention

from kvstore.kernels.attention import paged_decode, paged_extend
from kvstore.kernels.block_reference import dequantize_rows
from kvstore.kernels.formats import BlockLayout
from kvstore.kernels.reference import rows_of

LENGTH, NEW = 37, 5
CASE = Case(dtype="float32", lens=(LENGTH,), group=2)


def dense(case: Case = CASE) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the only sequence, [tokens, heads, head_dim] in float64, a head a query head."""
    made = world(case)
    blocks = made.block_table[0, : -(-LENGTH // case.block_size)].long()
    return tuple(
        rows[blocks].flatten(0, 1)[:LENGTH].double().repeat_interleave(case.group, 1)
        for rows in (made.views.k, made.views.v)
    )


def test_extend_is_causal_attention() -> None:
    """The last tokens see exactly what torch's attention with a causal mask lets them see."""
    k, v = dense()
    q = torch.randn(NEW, CASE.heads, CASE.head_dim, dtype=torch.float64)
    mask = torch.ones(NEW, LENGTH, dtype=torch.bool).tril(LENGTH - NEW)
    right = scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, scale=0.1
    )
    cu_q = torch.tensor([0, NEW], dtype=torch.int32)
    out, _ = paged_extend(q, **world(CASE).arguments(), cu_q=cu_q, max_q=NEW, sm_scale=0.1)
    assert torch.allclose(out, right.transpose(0, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("feature", ["plain", "window", "softcap", "sinks", "all"])
def test_decode_options_do_what_they_say(feature: str) -> None:
    """Window, cap and sinks, written out for one query: weights add up to 1 less the sink's."""
    case = Case(dtype="float32", lens=(LENGTH,), group=2, feature=feature)
    (k, v), options = dense(case), case.options()
    q = torch.randn(1, case.heads, case.head_dim, dtype=torch.float64)
    out, lse = paged_decode(q, **world(case).arguments(), **options, sm_scale=0.1)
    first = max(0, LENGTH - options["window"]) if "window" in options else 0
    for head in range(case.heads):
        logits = (k[first:, head] @ q[0, head]) * 0.1
        if "softcap" in options:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        total = logits.exp().sum()
        if "sinks" in options:
            total = total + options["sinks"][head].double().exp()
        assert torch.allclose(out[0, head], (logits.exp() / total) @ v[first:, head], atol=1e-12)
        assert math.isclose(float(lse[0, head]), float(total.log()), abs_tol=1e-12)


@pytest.mark.parametrize("kv_format", ["int8_th", "fp8_bh", "int4_kivi"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_quantised_rows_are_those_of_the_store(kv_format: str, head_dim: int) -> None:
    """Attention dequantises to what scatter_blocks would have written, before rounding."""
    case = Case(kv_format=kv_format, head_dim=head_dim, block_size=64, lens=(128,))
    made, layout = world(case), BlockLayout(1, 2, head_dim, 64, kv_format=kv_format)
    blocks = made.block_table[0, :2]
    for kv in (0, 1):
        codes, scales = made.views[kv], made.views[2 + kv]
        found = rows_of(codes, scales, blocks, kv_format, kv, torch.float32)
        taken = codes.view(torch.uint8)[blocks.long()].view(codes.dtype)
        right = dequantize_rows(taken, scales[blocks.long()], layout, kv)
        assert torch.equal(found.bfloat16(), right.flatten(0, 1))
