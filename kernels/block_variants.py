"""Which compiled forms of the block copies are checked for real chips: see `variants.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvstore.kernels.block_launch import by_bits, variant
from kvstore.kernels.formats import FORMATS, BlockLayout
from kvstore.kernels.variants import Variant

POINTERS = {
    "offset_ptr": "*i64", "page_ptr": "*i32", "slot_ptr": "*i32", "scale_ptr": "*bf16",
    "store_ptr": "*i64",
}  # fmt: skip
CODES = {"int8_th": "*i8", "fp8_bh": "*fp8e4nv", "int4_kivi": "*i16", "raw": "*i8"}
VALUES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


def block_variants(target: str) -> Iterator[Variant]:
    """A few for every chip; for the one that is tuned, each format and direction, odd shapes."""
    usual = {f: BlockLayout(32, 8, 128, 16, kv_format=f) for f in FORMATS}
    yield _one("", usual["raw"], 1, target, to_store=False)
    yield _one("", usual["int8_th"], 1, target, to_store=True)
    # An AMD warp of 64 threads leaves 8 bytes to each in int4's small tiles.
    restored = _one("", usual["int4_kivi"], 1, target, to_store=False)
    yield replace(restored, wide=not target.startswith("gfx"))
    # Where the chip has no float8, other code makes and reads these.
    yield _one("", usual["fp8_bh"], 1, target, to_store=True)
    yield _one("", usual["fp8_bh"], 1, target, to_store=False)
    if target != "sm_90":
        return
    yield _one("", usual["int8_th"], 1, target, to_store=False)
    large = BlockLayout(32, 8, 256, 128, "float16", "HND", "fp8_bh")
    yield _one(" P128 D256", large, 1, target, to_store=True)
    int4 = BlockLayout(32, 8, 128, 64, kv_format="int4_kivi")
    yield _one(" P64", int4, 1, target, to_store=True)
    yield _one(" P64 V", int4, 1, target, to_store=True, values=True)
    yield _one(" pages of a token, D80", BlockLayout(32, 8, 80, 64), 64, target, to_store=True)
    yield _one(" latents", BlockLayout(32, 1, 576, 64, kv_factor=1), 1, target, to_store=False)


def _one(
    what: str, layout: BlockLayout, pages: int, target: str, to_store: bool, values: bool = False
) -> Variant:
    chosen = variant(layout, pages, to_store, target)
    raw = layout.kv_format == "raw"
    name = f"{'gather' if to_store else 'scatter'} {layout.kv_format}{what}"
    return Variant(
        name,
        chosen.kernel,
        POINTERS | {
            "pool_ptr": "*i64" if raw else VALUES[layout.dtype],
            "code_ptr": "*i8" if by_bits(layout, target) else CODES[layout.kv_format],
        },
        chosen.constants | ({"VALUES": values} if layout.kv_format == "int4_kivi" else {}),
        chosen.num_warps,
        options={} if raw else {"enable_fp_fusion": False},
    )  # fmt: skip
