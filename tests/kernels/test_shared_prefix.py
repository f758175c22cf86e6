"""Cascade and MLA decode by Triton's interpreter against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attended import Case, compare, world

from kvstore.kernels.attention import cascade_decode, mla_decode, paged_decode


def joined(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of cascade_decode (two groups, of 2 requests and of 1), and of plain decode."""
    made = world(case)
    shared = made.arguments() | {"sm_scale": case.head_dim**-0.5}
    prefixes = slice(3, 5)
    cascade = shared | {
        "block_table": made.block_table[:3], "seq_lens": made.seq_lens[:3],
        "prefix_table": made.block_table[prefixes], "prefix_lens": made.seq_lens[prefixes],
        "cu_group": torch.tensor([0, 2, 3], dtype=torch.int32), "max_group": 2,
    }  # fmt: skip
    rows, lens = [], []
    for request, group in enumerate((3, 3, 4)):
        whole = case.lens[group] // case.block_size
        front, own = made.block_table[group, :whole], made.block_table[request]
        rows.append(torch.cat([front, own, torch.zeros(8, dtype=torch.int32)])[:8])
        lens.append(case.lens[group] + case.lens[request])
    plain = shared | {"block_table": torch.stack(rows), "seq_lens": torch.tensor(lens).int()}
    return cascade, plain


@pytest.mark.parametrize(
    ("kv_format", "options"),
    [("raw", {}), ("int8_th", {"softcap": 2.0}), ("int4_kivi", {"sinks": torch.ones(4)})],
)
def test_cascade_equals_plain_decode(kv_format: str, options: dict[str, Any]) -> None:
    """A prefix read once for its group gives what each request gets from prefix and suffix."""
    case = Case(lens=(1, 20, 17, 64, 32), group=2, kv_format=kv_format)
    cascade, plain = joined(case)
    q = torch.randn(3, case.heads, case.head_dim).bfloat16()
    wanted = paged_decode(q.double(), **plain, **options, backend="reference")
    compare(
        cascade_decode(q.double(), **cascade, **options, backend="reference"), wanted, "float32"
    )
    compare(cascade_decode(q, **cascade, **options, backend="triton"), wanted, "bfloat16")


@pytest.mark.parametrize(
    ("heads", "dtype", "lens", "num_splits"),
    [
        (16, torch.bfloat16, (0, 17, 70), 2),
        pytest.param(40, torch.bfloat16, (33,), 1, marks=pytest.mark.long),
        pytest.param(5, torch.float16, (64, 1), 3, marks=pytest.mark.long),
    ],
)
def test_mla_equals_the_reference(
    heads: int, dtype: torch.dtype, lens: tuple[int, ...], num_splits: int
) -> None:
    """All heads attend to one latent a token; what lies behind a sequence's end is not read."""
    torch.manual_seed(0)
    latents = torch.randn(16, 16, 576).to(dtype)
    table = torch.randperm(16)[: 5 * len(lens)].view(len(lens), 5).int()
    for row, n in enumerate(lens):
        if n % 16:
            latents[table[row, n // 16], n % 16 :] = math.nan
    nope, rope = (torch.randn(len(lens), heads, width).to(dtype) for width in (512, 64))
    more = (latents, table, torch.tensor(lens).int())
    found = mla_decode(nope, rope, *more, sm_scale=0.06, num_splits=num_splits, backend="triton")
    wanted = mla_decode(nope.double(), rope.double(), *more, sm_scale=0.06, backend="reference")
    compare(found, wanted, str(dtype).removeprefix("torch."))
