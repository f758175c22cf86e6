"""Which compiled forms of the kernels are checked for real chips, without one: `compile_check.py`.

A variant is a kernel with the constants and types of a launch. Those of attention come from
`plans.py`, where launches take them from, so a setting that is checked is a setting that runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from kvstore.kernels.options import HEAD_DIMS
from kvstore.kernels.plans import (
    Plan,
    Shape,
    decode_plan,
    extend_plan,
    merge_plan,
    mla_plan,
)


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel.

    `types` of its parameters by name, as Triton spells them; those not named are i32. Pointers are
    multiples of 16 and so are the integers named in `sixteens`. `dot`: tensor cores must be used.
    `wide`: global memory must be read 16 bytes at a time, `asynchronous`: straight into shared
    memory where the chip can.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    sixteens: tuple[str, ...] = ()
    dot: bool = False
    wide: bool = True
    asynchronous: bool = False
    options: dict[str, Any] = field(default_factory=dict)


KV_STRIDES = ("sq_b", "sq_t", "sq_h", "sk_n", "sk_t", "sk_h", "sv_n", "sv_t", "sv_h", "sr_b",
              "sr_h", "sc_n", "sc_t", "so_b", "so_s", "so_t", "so_h")  # fmt: skip
SCALE_STRIDES = ("sks_n", "sks_h", "svs_n", "svs_h")
POINTERS = {
    "table_ptr": "*i32", "lens_ptr": "*i32", "cu_ptr": "*i32", "sinks_ptr": "*fp32",
    "lse_ptr": "*fp32", "out_lse_ptr": "*fp32", "ks_ptr": "*bf16", "vs_ptr": "*bf16",
    "scale": "fp32", "cap": "fp32",
}  # fmt: skip


def _variant(name: str, plan: Plan, kv_format: str = "raw", dtype: str = "bf16") -> Variant:
    kv = f"*{dtype}" if kv_format == "raw" else "*i16"
    types = dict.fromkeys(("q_ptr", "r_ptr", "c_ptr", "out_ptr"), f"*{dtype}")
    types |= POINTERS | {"k_ptr": kv, "v_ptr": kv}
    types["o_ptr"] = "*fp32" if plan.constants.get("SPLITS", 2) != 1 else f"*{dtype}"
    decodes = name.startswith(("decode", "mla", "extend"))
    return Variant(
        name, plan.kernel, types, dict(plan.constants), plan.num_warps, plan.num_stages,
        sixteens=KV_STRIDES + (SCALE_STRIDES if kv_format == "int4_kivi" else ()),
        dot=decodes and dtype != "fp32", asynchronous=decodes,
    )  # fmt: skip


def attention_variants(target: str) -> Iterator[Variant]:
    """Attention for one of `dispatch.TARGETS`: each format, the widest shapes, each feature."""
    for kv_format in ("raw", "int8_th", "fp8_bh", "int4_kivi"):
        shape = Shape(4, 128, 64 if kv_format == "int4_kivi" else 16, kv_format)
        yield _variant(f"decode_{kv_format}", decode_plan(target, shape, 8), kv_format)
        extend = extend_plan(target, shape, 4096, 1, True)
        yield _variant(f"extend_{kv_format}", extend, kv_format)
    yield _variant("mla_16", mla_plan(target, Shape(1, 512, 64), 16, 64, 8))
    yield _variant("mla_128", mla_plan(target, Shape(1, 512, 64), 128, 64, 8))
    yield _variant("merge", merge_plan(128, 8))
    if target != "sm_90":
        return
    features = Shape(8, 128, 16, window=True, softcap=True, sinks=True)
    yield _variant("decode_features", decode_plan(target, features, 8))
    yield _variant("extend_features", extend_plan(target, features, 4096, 1, True))
    yield _variant("decode_256", decode_plan(target, Shape(16, 256, 128), 8))
    yield _variant("extend_256", extend_plan(target, Shape(16, 256, 128), 4096, 1, True))
    yield _variant("decode_64", decode_plan(target, Shape(1, 64, 32, "int8_th"), 1), "int8_th")
    yield _variant("decode_fp16", decode_plan(target, Shape(4, 128, 16, "fp8_bh"), 8), "fp8_bh",
                   "fp16")  # fmt: skip
    yield _variant("extend_few", extend_plan(target, Shape(4, 128, 16), 8, 16, True))
    yield _variant("decode_int4_64", decode_plan(target, Shape(8, 64, 16, "int4_kivi"), 8),
                   "int4_kivi")  # fmt: skip
    yield _of_shape(target, "decode", "raw", "fp32", 128)
    yield _of_shape(target, "extend", "int8_th", "fp32", 128)


def every_shape(target: str) -> Iterator[Variant]:
    """Attention in every format and size of head: an hour's work, for those who change plans."""
    sizes = product(("raw", "int8_th", "fp8_bh", "int4_kivi"), ("bf16", "fp32"), HEAD_DIMS)
    for kv_format, dtype, head_dim in sizes:
        for operation in ("decode", "extend", "extend_few"):
            yield _of_shape(target, operation, kv_format, dtype, head_dim)


def _of_shape(target: str, operation: str, kv_format: str, dtype: str, head_dim: int) -> Variant:
    """The hardest kind of block: of 16 tokens, so that a tile needs several ids."""
    shape = Shape(4, head_dim, 16, kv_format, 4 if dtype == "fp32" else 2)
    if operation == "decode":
        plan = decode_plan(target, shape, 8)
    elif operation == "extend":
        plan = extend_plan(target, shape, 4096, 1, True)
    else:
        plan = extend_plan(target, shape, 16, 8, True)
    name = f"{operation}_{kv_format}_{dtype}_D{head_dim}"
    made = _variant(name, plan, kv_format, dtype)
    # Codes that become float32 are read in short pieces: that is slow, and seldom wanted.
    quick = dtype != "fp32" or kv_format == "raw"
    # A row of 32 bytes leaves 8 to each thread of an AMD warp of 64.
    short = kv_format == "int4_kivi" and head_dim == 64 and target.startswith("gfx")
    return replace(made, asynchronous=quick, wide=quick and not short)
