"""Random attention cases on poisoned pools, and the comparison with the reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from random import Random
from typing import Any

import torch

from kvstore.kernels.attention import paged_decode, paged_extend
from kvstore.kernels.block_reference import quantize_rows
from kvstore.kernels.formats import BlockLayout
from kvstore.kernels.views import LayerViews, layer_views

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}
LSE_TOLERANCE = 1e-3
POISON = 0xFF  # NaN as a value, as a scale and as e4m3


@dataclass(frozen=True)
class Case:
    """One case; `lens` of whole sequences, the last `new` tokens of each are queries."""

    dtype: str = "bfloat16"
    order: str = "NHD"
    group: int = 4
    block_size: int = 16
    head_dim: int = 64
    lens: tuple[int, ...] = (1, 37, 130)
    feature: str = "plain"
    kv_format: str = "raw"
    num_splits: int = 2
    new: int = 1
    causal: bool = True
    num_kv_heads: int = 2

    def __str__(self) -> str:
        lens = ",".join(map(str, self.lens))
        more = f"-new{self.new}" if self.new > 1 else ""
        return (
            f"{self.kv_format}-{self.dtype}-{self.order}-g{self.group}-p{self.block_size}"
            f"-d{self.head_dim}-n{lens}-{self.feature}-s{self.num_splits}{more}"
        )

    @property
    def heads(self) -> int:
        return self.num_kv_heads * self.group

    def options(self) -> dict[str, Any]:
        """What the feature adds to a call."""
        sinks = torch.linspace(-1.0, 2.0, self.heads)
        return {
            "plain": {},
            "window": {"window": 20},
            "softcap": {"softcap": 2.0},
            "sinks": {"sinks": sinks},
            "all": {"window": 33, "softcap": 3.0, "sinks": sinks},
        }[self.feature]


def pairwise(choices: dict[str, Sequence[Any]], seed: int = 7) -> list[Case]:
    """Cases in which every two values of different fields meet at least once: greedy, seeded."""
    random, names = Random(seed), list(choices)
    wanted = {
        (a, x, b, y)
        for a, b in combinations(names, 2)
        for x, y in product(choices[a], choices[b])
    }  # fmt: skip
    cases = []
    while wanted:
        drawn = [{name: random.choice(choices[name]) for name in names} for _ in range(60)]
        a, x, b, y = min(wanted, key=repr)
        best = max(({**one, a: x, b: y} for one in drawn), key=lambda one: len(_met(one, wanted)))
        wanted -= _met(best, wanted)
        cases.append(Case(**best))
    return cases


def _met(one: dict[str, Any], wanted: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    return {pair for pair in wanted if one[pair[0]] == pair[1] and one[pair[2]] == pair[3]}


@dataclass
class World:
    """A pool, its views, and tables whose blocks lie anywhere; what must not be read is NaN."""

    views: LayerViews
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    kv_format: str

    def arguments(self) -> dict[str, Any]:
        return {
            "k_pool": self.views.k, "v_pool": self.views.v, "k_scale": self.views.k_scale,
            "v_scale": self.views.v_scale, "kv_format": self.kv_format,
            "block_table": self.block_table, "seq_lens": self.seq_lens,
        }  # fmt: skip


def world(case: Case, seed: int = 0) -> World:
    torch.manual_seed(seed)
    counts = [-(-n // case.block_size) for n in case.lens]
    total = sum(counts) + 2
    layout = BlockLayout(
        1, case.num_kv_heads, case.head_dim, case.block_size, case.dtype, case.order, case.kv_format
    )
    pool = torch.full((total, layout.block_bytes), POISON, dtype=torch.uint8)
    views, places = layer_views(pool, layout, 0), torch.randperm(total)
    used, unused = places[: sum(counts)], places[-1]
    for kv in (0, 1):
        rows = torch.randn(len(used), case.block_size, case.num_kv_heads, case.head_dim)
        codes, scales = quantize_rows(rows.to(DTYPES[case.dtype]), layout, kv)
        _bytes(views[kv])[used] = _bytes(codes)
        if scales is not None:
            views[2 + kv][used] = scales
    table = torch.full((len(case.lens), max(1, *counts) + 1), int(unused), dtype=torch.int32)
    first = 0
    for row, (n, count) in enumerate(zip(case.lens, counts, strict=True)):
        table[row, :count] = used[first : first + count].int()
        first += count
        if n % case.block_size:
            _poison_behind(views, case, int(table[row, count - 1]), n % case.block_size)
    return World(views, table, torch.tensor(case.lens, dtype=torch.int32), case.kv_format)


def _poison_behind(views: LayerViews, case: Case, block: int, used: int) -> None:
    """Rows behind a sequence's end; scales there too, where a token has its own."""
    for rows in views[:2]:
        rows[block, used:].view(torch.uint8).fill_(POISON)
    if case.kv_format == "int8_th":
        views.k_scale[block, :, used:] = float("nan")
    if case.kv_format in ("int8_th", "int4_kivi"):
        views.v_scale[block, ..., used:] = float("nan")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor


def check(case: Case) -> None:
    """Runs the case by Triton and in float64, and compares."""
    made, dtype = world(case), DTYPES[case.dtype]
    counts = [min(case.new, n) for n in case.lens] if case.new > 1 else [1] * len(case.lens)
    q = torch.randn(sum(counts), case.heads, case.head_dim).to(dtype)
    shared = made.arguments() | case.options() | {"sm_scale": case.head_dim**-0.5}
    op = paged_decode
    if case.new > 1:
        cu_q = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        shared |= {"cu_q": cu_q, "max_q": max(counts), "causal": case.causal}
        op = paged_extend
    out = torch.full_like(q, float("nan"))
    found = op(q, **shared, num_splits=case.num_splits, out=out, backend="triton")
    assert found[0] is out
    compare(found, op(q.double(), **shared, backend="reference"), case.dtype)


def compare(
    found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], dtype: str
) -> None:
    """Outputs by relative norm, log-sum-exps by value; empty queries are 0 and -inf exactly."""
    (out, lse), (right, right_lse) = found, wanted
    seen = torch.isfinite(right_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert (lse[~seen] == float("-inf")).all()
    assert torch.isfinite(out).all()
    assert (out[~seen] == 0).all()
    norm = right.norm()
    assert float((out.double() - right).norm()) <= TOLERANCE[dtype] * float(norm)
    if seen.any():
        assert float((lse.double() - right_lse)[seen].abs().max()) <= LSE_TOLERANCE


def spread(cases: list[Case], every: int = 3) -> list[Any]:
    """Parameters of a test: of every `every` cases one runs always, the others in long runs."""
    import pytest

    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.long] if number % every else [])
        for number, case in enumerate(cases)
    ]
