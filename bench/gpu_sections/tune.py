"""Settings of the attention kernels: compiles a share of them, or measures all of them.

Run by `tune_kernels.py`: `tune.py ONLY PART PARTS` compiles, `tune.py ONLY JSON SECONDS` measures.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from gpu_sections.context import graph_seconds, relative_error
from gpu_sections.paged import Paged, paged
from kvstore.kernels import launch
from kvstore.kernels.formats import BlockLayout
from kvstore.kernels.options import Options, Pools
from kvstore.kernels.plans import Tuning

HEADS, KV_HEADS, WIDTH = 32, 8, 128
LAYERS = 3
DECODE = (  # tokens of a tile, warps, stages
    (16, 1, 4), (32, 1, 2), (32, 1, 3), (32, 2, 3), (32, 2, 4), (32, 4, 4), (32, 4, 6), (64, 2, 2),
    (64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 4, 5), (64, 8, 3), (128, 4, 2),
    (128, 4, 3), (128, 8, 2), (128, 8, 3),
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
EXTEND = (  # rows, tokens of a tile, warps, stages
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3),
    (128, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2),
    (128, 32, 8, 3), (256, 64, 8, 2), (256, 64, 16, 3), (128, 128, 4, 2), (64, 32, 4, 2),
    (128, 32, 4, 2),
)  # fmt: skip
MLA = (
    (16, 32, 4, 2), (16, 64, 4, 2), (16, 64, 8, 2), (16, 32, 2, 3), (32, 32, 4, 2), (32, 32, 8, 2),
    (32, 64, 8, 2), (64, 32, 8, 2), (64, 64, 8, 2), (64, 32, 16, 2), (64, 64, 16, 2),
    (64, 32, 8, 3), (16, 32, 4, 3), (16, 64, 4, 3),
)  # fmt: skip


@dataclass
class Case:
    """One setting of one operation on one shape; `small` while it is only compiled."""

    operation: str
    kv_format: str
    shape: tuple[int, int]
    tuning: Tuning | None
    splits: int | None = None

    def facts(self) -> dict[str, Any]:
        chosen = self.tuning
        return {
            "operation": self.operation, "kv_format": self.kv_format, "shape": self.shape,
            "splits": self.splits, "tuning": None if chosen is None else [
                chosen.block_m, chosen.block_n, chosen.num_warps, chosen.num_stages],
        }  # fmt: skip


def cases(only: str) -> Iterator[Case]:
    """All settings; those of decode and mla first, since most depends on them."""
    for shape in ((64, 8192),):
        for kv_format in ("raw", "int8_th", "fp8_bh", "int4_kivi"):
            for setting in (None, *DECODE):
                tuning = None if setting is None else Tuning(0, *setting)
                yield Case("decode", kv_format, shape, tuning)
    for heads in (16, 128):
        for setting in (None, *MLA):
            if setting is None or setting[0] <= heads:
                yield Case("mla", "raw", (64, heads), None if setting is None else Tuning(*setting))
    for kv_format in ("raw", "int8_th", "fp8_bh", "int4_kivi"):
        for setting in (None, *EXTEND):
            if kv_format != "int4_kivi" or setting is None or setting[0] * setting[1] <= 8192:
                tuning = None if setting is None else Tuning(*setting)
                yield Case("extend", kv_format, (2048, 16384), tuning)
    for kv_format in ("raw", "int8_th"):
        for shape in ((64, 8192), (16, 32768), (1, 131072)):
            for splits in SPLITS if shape[0] > 1 else (16, 24, 32, 48, 64):
                yield Case("decode", kv_format, shape, None, splits)


class Bench:
    """Keeps the last pool, which neighbours among the cases share, and the first output of it."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.key: tuple[Any, ...] = ()
        self.pool: Paged | None = None
        self.first: torch.Tensor | None = None

    def run(self, case: Case) -> dict[str, Any]:
        key = (case.operation, case.kv_format, case.shape)
        if key != self.key:
            self.pool = self.first = None
            self.key, self.pool = key, self._pool(case)
        assert self.pool is not None, "it was just made"
        works, out, amount = getattr(self, f"_{case.operation}")(case, self.pool)
        works[0]()
        torch.cuda.synchronize()
        if self.small:
            return {}
        if self.first is None:
            self.first = out.clone()
        error = relative_error(out, self.first)
        took = graph_seconds(works, 0.06)
        return {"seconds": took, "rate": amount / took, "error_to_chosen": error}

    def _pool(self, case: Case) -> Paged:
        batch, length = case.shape
        if case.operation == "mla":
            return paged(BlockLayout(1, 1, 576, 64, kv_factor=1),
                         [8192] * (2 if self.small else batch), spare=0)  # fmt: skip
        if case.operation == "extend":
            layout = BlockLayout(1, KV_HEADS, WIDTH, 64, kv_format=case.kv_format)
            return paged(layout, [batch + length] * (1 if self.small else 2), spare=0)
        layers = 1 if self.small else (LAYERS if batch * length < 1 << 20 else 2)
        layout = BlockLayout(layers, KV_HEADS, WIDTH, 16 if case.kv_format != "int4_kivi" else 64,
                             kv_format=case.kv_format)  # fmt: skip
        return paged(layout, [length] * (min(batch, 2) if self.small else batch), spare=0)

    def _decode(self, case: Case, pool: Paged) -> tuple[list[Callable[[], Any]], Any, float]:
        torch.manual_seed(0)
        q = torch.randn(len(pool.seq_lens), HEADS, WIDTH, device="cuda").bfloat16()
        out, options = torch.empty_like(q), Options(WIDTH**-0.5)

        def work(pools: Pools) -> Any:
            return launch.paged_decode(
                q, pools, pool.block_table, pool.seq_lens, options, case.splits, out, case.tuning
            )

        works = [partial(work, _pools(pool, layer)) for layer in range(len(pool.views))]
        return works, out, pool.kv_bytes

    def _extend(self, case: Case, pool: Paged) -> tuple[list[Callable[[], Any]], Any, float]:
        torch.manual_seed(0)
        count, (new, before) = len(pool.seq_lens), case.shape
        q = torch.randn(count * new, HEADS, WIDTH, device="cuda").bfloat16()
        cu_q = torch.arange(0, count * new + 1, new, dtype=torch.int32, device="cuda")
        out, options, pools = torch.empty_like(q), Options(WIDTH**-0.5), _pools(pool, 0)
        flops = count * 4 * HEADS * WIDTH * (new * before + new * (new + 1) / 2)
        return [lambda: launch.paged_extend(
            q, pools, pool.block_table, pool.seq_lens, cu_q, new, True, options, None, out,
            case.tuning)], out, flops  # fmt: skip

    def _mla(self, case: Case, pool: Paged) -> tuple[list[Callable[[], Any]], Any, float]:
        torch.manual_seed(0)
        heads, count = case.shape[1], len(pool.seq_lens)
        nope, rope = (torch.randn(count, heads, n, device="cuda").bfloat16() for n in (512, 64))
        out, options = torch.empty_like(nope), Options(0.07)
        latents = pool.views[0].k[:, :, 0]
        return [lambda: launch.mla_decode(
            nope, rope, latents, pool.block_table, pool.seq_lens, options, None, out, case.tuning)
        ], out, pool.kv_bytes  # fmt: skip


def _pools(pool: Paged, layer: int) -> Pools:
    view = pool.views[layer]
    return Pools(view.k, view.v, view.k_scale, view.v_scale, pool.layout.kv_format)


def compile_share(only: str, part: int, parts: int) -> None:
    bench = Bench(small=True)
    for case in list(cases(only))[part::parts]:
        if only in case.operation:
            try:
                bench.run(case)
            except Exception as error:
                print(f"{case.facts()}: {type(error).__name__}", flush=True)


def measure(only: str, path: Path, seconds: float) -> None:
    bench, rows, begin = Bench(small=False), [], time.monotonic()
    for case in cases(only):
        if only not in case.operation or time.monotonic() - begin > seconds - 3:
            continue
        row = case.facts()
        try:
            row |= bench.run(case)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
        path.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}))
    print_best(rows)


def print_best(rows: list[dict[str, Any]]) -> None:
    """The chosen setting and the five fastest, a line each, by operation, format and shape."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "rate" in row:
            by_splits = row["splits"] is not None
            key = (row["operation"], row["kv_format"], tuple(row["shape"]), by_splits)
            groups.setdefault(key, []).append(row)
    for key, found in groups.items():
        print(*key[:3])
        best = sorted(found, key=lambda row: -row["rate"])[:5]
        for row in [r for r in found if not r["tuning"]][:1] + best:
            print(f"   {row['tuning']} splits {row['splits']}: {row['seconds'] * 1e6:.0f} us, "
                  f"{row['rate'] / 1e9:.0f} G/s, off {row['error_to_chosen']:.1e}")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[2].isdigit():
        compile_share(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        measure(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
