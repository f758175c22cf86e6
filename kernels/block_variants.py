"""Which compiled forms of the block copies are checked for real chips: see `variants.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvstore.kernels.block_launch import variant
from kvstore.kernels.formats import FORMATS, BlockLayout
from kvstore.kernels.variants import Variant

POINTERS = {
    "offset_ptr": "*i64", "page_ptr": "*i32", "slot_ptr": "*i32", "scale_ptr": "*bf16",
    "store_ptr": "*i64",
}  # fmt: skip
CODES = {"int8_th": "*i8", "fp8_bh": "*fp8e4nv", "int4_kivi": "*i16", "raw": "*i8"}
VALUES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


def block_variants(target: str) -> Iterator[Variant]:
    """Copies of the usual shape, each format and direction; awkward shapes for one chip."""
    # An AMD warp of 64 threads leaves 8 bytes to each in int4's small tiles.
    narrow = target.startswith("gfx")
    for kv_format in FORMATS:
        if kv_format == "fp8_bh" and target == "sm_80":
            continue  # that chip has no e4m3
        for tokens in (16,) if target != "sm_90" else (16, 64):
            yield from _both(
                f"P{tokens}", BlockLayout(32, 8, 128, tokens, kv_format=kv_format), 1, narrow
            )
    if target != "sm_90":
        return
    yield from _both("pages of a token", BlockLayout(32, 8, 128, 64), 64)
    yield from _both("D80", BlockLayout(32, 8, 80, 16), 1)
    yield from _both("latents", BlockLayout(32, 1, 576, 64, kv_factor=1), 1)
    yield from _both("D256 P128 HND", BlockLayout(32, 8, 256, 128, "float16", "HND", "fp8_bh"), 1)
    yield from _both("D64", BlockLayout(32, 2, 64, 32, kv_format="int4_kivi"), 1)


def _both(what: str, layout: BlockLayout, pages: int, narrow: bool = False) -> Iterator[Variant]:
    for to_store in (True, False):
        for values in (False, True) if layout.kv_format == "int4_kivi" else (False,):
            made = _one(what, layout, pages, to_store, values)
            yield replace(made, wide=not (narrow and layout.kv_format == "int4_kivi"))


def _one(what: str, layout: BlockLayout, pages: int, to_store: bool, values: bool) -> Variant:
    chosen = variant(layout, pages, to_store)
    raw = layout.kv_format == "raw"
    name = f"{'gather' if to_store else 'scatter'} {layout.kv_format} {what}{' V' * values}"
    return Variant(
        name,
        chosen.kernel,
        POINTERS | {
            "pool_ptr": "*i64" if raw else VALUES[layout.dtype],
            "code_ptr": CODES[layout.kv_format],
        },
        chosen.constants | ({"VALUES": values} if layout.kv_format == "int4_kivi" else {}),
        chosen.num_warps,
        options={} if raw else {"enable_fp_fusion": False},
    )  # fmt: skip
