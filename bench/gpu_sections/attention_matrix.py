"""Attention on the GPU against the float64 reference: formats, shapes, features, lengths."""

from __future__ import annotations

from itertools import product
from typing import Any
from zlib import crc32

import torch

from gpu_sections.context import Context, relative_error
from gpu_sections.paged import Paged, paged
from kvstore.kernels.attention import cascade_decode, mla_decode, paged_decode, paged_extend
from kvstore.kernels.formats import FORMATS, BlockLayout

TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3}
LSE_TOLERANCE = 1e-3
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 50}, "softcap": {"softcap": 20.0}, "sinks": {"sinks": True},
}  # fmt: skip
LENS = {"short": [0, 1, 16, 17, 130], "long": [2000, 37, 0, 4097]}


def cases() -> list[dict[str, Any]]:
    """What is measured later first, then a stride through the product of everything."""
    base = {
        "heads": 8, "group": 4, "width": 128, "tokens": 16, "dtype": "bfloat16", "order": "NHD",
        "feature": "plain", "lens": "long", "splits": None, "kv_format": "raw",
    }  # fmt: skip
    found = [
        {**base, "op": op, "kv_format": kv_format, "tokens": tokens}
        for op in ("decode", "extend")
        for kv_format in FORMATS
        for tokens in (16, 64)
    ]
    found += [{**base, "op": "cascade", "kv_format": f, "tokens": 64} for f in ("raw", "int8_th")]
    found += [{**base, "op": "mla", "tokens": 64, "heads": h, "width": 576} for h in (16, 128)]
    names = ("op", "kv_format", "width", "tokens", "dtype", "order", "group", "feature", "lens",
             "splits")  # fmt: skip
    whole = product(
        ("decode", "extend"), FORMATS, (64, 80, 96, 128, 256), (16, 32, 64, 128),
        ("bfloat16", "float16", "float32"), ("NHD", "HND"), (1, 4, 7, 8), tuple(FEATURES),
        tuple(LENS), (None, 1, 4),
    )  # fmt: skip
    strided = list(whole)[::769]
    found += [{**base, **dict(zip(names, case, strict=True)), "heads": 3} for case in strided]
    return found


def run(context: Context, answer: dict[str, Any]) -> None:
    answer.update(cases=0, left_out=0, failed=[], worst_error={})
    for case in context.share(cases()):
        if context.left < 3:
            answer["left_out"] += 1
            continue
        answer["cases"] += 1
        try:
            _check(case, answer)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            answer["failed"].append({**case, "error": text[-300:]})
            if "CUDA error" in text or "illegal" in text:
                raise


def _check(case: dict[str, Any], answer: dict[str, Any]) -> None:
    torch.manual_seed(crc32(repr(case).encode()))
    kind = {"mla": _mla, "cascade": _cascade, "decode": _decode, "extend": _extend}[case["op"]]
    out, lse, wanted, wanted_lse = kind(case)
    error = relative_error(out, wanted)
    finite = torch.isfinite(wanted_lse)
    same = bool((torch.isneginf(lse) == torch.isneginf(wanted_lse)).all())
    lse_error = float((lse.double()[finite] - wanted_lse.double()[finite]).abs().max())
    name = f"{case['op']} {case['kv_format']} {case['dtype']}"
    worst = answer["worst_error"]
    worst[name] = max(error, worst.get(name, 0.0))
    if error > TOLERANCE[case["dtype"]] or lse_error > LSE_TOLERANCE or not same:
        answer["failed"].append({**case, "relative_error": error, "lse_error": lse_error})


def _setting(case: dict[str, Any]) -> tuple[Paged, dict[str, Any], int]:
    layout = BlockLayout(
        1, case["heads"], case["width"], case["tokens"], case["dtype"], case["order"],
        case["kv_format"],
    )  # fmt: skip
    heads = case["heads"] * case["group"]
    options = {"sm_scale": case["width"] ** -0.5, **FEATURES[case["feature"]]}
    if options.get("sinks"):
        options["sinks"] = torch.randn(heads, device="cuda")
    return paged(layout, LENS[case["lens"]]), options, heads


def _query(case: dict[str, Any], *shape: int) -> torch.Tensor:
    dtype = getattr(torch, case["dtype"])
    return torch.randn(*shape, device="cuda").to(dtype)


def _decode(case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    pool, options, heads = _setting(case)
    q = _query(case, len(pool.seq_lens), heads, case["width"])
    out = torch.full_like(q, float("nan"))
    found, lse = paged_decode(
        q, **pool.arguments(0), **options, out=out, num_splits=case["splits"], backend="triton"
    )
    wanted = paged_decode(q.double(), **pool.arguments(0), **options, backend="reference")
    return found, lse, *wanted


def _extend(case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    pool, options, heads = _setting(case)
    new = [min(n, 77 if case["lens"] == "short" else 300) for n in pool.seq_lens.tolist()]
    cu_q = torch.tensor([sum(new[:i]) for i in range(len(new) + 1)], device="cuda").int()
    q = _query(case, sum(new), heads, case["width"])
    more = {"cu_q": cu_q, "max_q": max(new), **pool.arguments(0), **options}
    found = paged_extend(q, **more, backend="triton")
    return *found, *paged_extend(q.double(), **more, backend="reference")


def _cascade(case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Two groups, of three requests and of one, whose prefixes lie in the same pool."""
    layout = BlockLayout(1, case["heads"], case["width"], case["tokens"], case["dtype"],
                         kv_format=case["kv_format"])  # fmt: skip
    lens = [30, 0, 65, 200, 3 * case["tokens"], 5 * case["tokens"]]
    pool = paged(layout, lens)
    arguments = pool.arguments(0)
    q = _query(case, 4, case["heads"] * case["group"], case["width"])
    more = {
        **arguments, "block_table": pool.block_table[:4], "seq_lens": pool.seq_lens[:4],
        "prefix_table": pool.block_table[4:], "prefix_lens": pool.seq_lens[4:],
        "cu_group": torch.tensor([0, 3, 4], dtype=torch.int32, device="cuda"), "max_group": 3,
        "sm_scale": case["width"] ** -0.5,
    }  # fmt: skip
    found = cascade_decode(q, **more, backend="triton")
    return *found, *cascade_decode(q.double(), **more, backend="reference")


def _mla(case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    layout = BlockLayout(1, 1, case["width"], case["tokens"], case["dtype"], kv_factor=1)
    pool = paged(layout, LENS[case["lens"]])
    latents = pool.views[0].k[:, :, 0]
    queries = [_query(case, len(pool.seq_lens), case["heads"], width) for width in (512, 64)]
    more = (latents, pool.block_table, pool.seq_lens)
    found = mla_decode(*queries, *more, sm_scale=192**-0.5, backend="triton")
    doubled = (query.double() for query in queries)
    return *found, *mla_decode(*doubled, *more, sm_scale=192**-0.5, backend="reference")
