"""Settings of the attention kernels: tiles, warps and stages, by chip, format and shape.

Launches and the compile check ask here, so what is checked is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstore.kernels.jit.decode import decode
from kvstore.kernels.jit.decode_int4 import decode_int4
from kvstore.kernels.jit.extend import extend
from kvstore.kernels.jit.merge import merge
from kvstore.kernels.jit.mla import mla_decode

ROWS_MIN = 16
"""Rows of the smallest tile that tensor cores multiply."""
SPLITS_MAX = 64


@dataclass(frozen=True)
class Plan:
    """A kernel, its compile-time constants, and how it is compiled."""

    kernel: Any
    constants: dict[str, int | bool | str]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Shape:
    """What settings depend on: heads a KV head serves, sizes, the format, and which features."""

    group: int
    head_dim: int
    block_size: int
    kv_format: str = "raw"
    value_bytes: int = 2
    window: bool = False
    softcap: bool = False
    sinks: bool = False

    @property
    def parts(self) -> int:
        """Matrices that a row of KV is multiplied as; see `jit/unpack.py`."""
        return {"raw": 1, "int4_kivi": 4}.get(self.kv_format, 2)

    @property
    def width(self) -> int:
        """Columns of each of those matrices, padded."""
        return max(16, power_of_two(self.head_dim // self.parts))

    @property
    def token_group(self) -> int:
        """Tokens that share K scales in int4_kivi."""
        return min(32, self.block_size)

    @property
    def features(self) -> dict[str, int | bool | str]:
        return {"WINDOW": self.window, "SOFTCAP": self.softcap, "SINKS": self.sinks}


@dataclass(frozen=True)
class Tuning:
    """Settings a caller may force, to measure others than the chosen ones; 0: as chosen."""

    block_m: int = 0
    block_n: int = 0
    num_warps: int = 0
    num_stages: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def power_of_two(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def _tricks(target: str, shape: Shape) -> bool:
    """Whether codes become values by the bit tricks of `jit/unpack.py`: 16-bit ones only."""
    return target.startswith("sm_") and shape.value_bytes == 2


def decode_plan(target: str, shape: Shape, splits: int, tuning: Tuning | None = None) -> Plan:
    """Settings of `paged_decode`: small tiles, many bytes in flight."""
    block_n, warps, stages = _decode_tiles(target, shape)
    tuning = tuning or Tuning()
    block_n, warps = tuning.block_n or block_n, tuning.num_warps or warps
    constants = {
        "GROUP": shape.group, "ROWS": max(ROWS_MIN, power_of_two(shape.group)),
        "D": shape.head_dim, "WIDTH": shape.width, "PAGE": shape.block_size,
        "BLOCK_N": block_n, "SPLITS": splits, "ASM": _tricks(target, shape), **shape.features,
    }  # fmt: skip
    if shape.kv_format == "int4_kivi":
        groups = max(1, block_n // shape.token_group)
        heads = max(power_of_two(shape.group), ROWS_MIN // groups)
        constants |= {
            "HEADS": heads, "ROWS": heads * groups, "BLOCK_N": groups * shape.token_group,
            "TOKENS": shape.token_group,
        }  # fmt: skip
        return Plan(decode_int4, constants, warps, tuning.num_stages or stages)
    constants["FORMAT"] = shape.kv_format
    return Plan(decode, constants, warps, tuning.num_stages or stages)


def _decode_tiles(target: str, shape: Shape) -> tuple[int, int, int]:
    """(tokens of a tile, warps, stages)."""
    wide = shape.head_dim > 128
    if target == "gfx942":
        row = shape.value_bytes * shape.width
        return (16 if row > 512 else 32 if row > 256 else 64), 4, 2
    if shape.value_bytes == 4:
        # Without tensor cores a thread holds whole rows in registers, so tiles are small, and rows
        # of an odd length spill on sm_90 with fewer warps.
        is_many = shape.width != shape.head_dim if shape.kv_format == "raw" else wide
        return (32 if shape.parts == 2 and shape.width <= 32 else 16), (8 if is_many else 4), 3
    if shape.kv_format == "raw":
        return (32 if wide else 64), 4, 3
    if shape.kv_format == "int4_kivi":
        # As many token groups as there are rows left by the heads; see `jit/decode_int4.py`.
        groups = max(1, ROWS_MIN // power_of_two(shape.group))
        tokens = min(32 if shape.width <= 16 else 128, groups * shape.token_group)
        return tokens, (8 if wide else 4 if tokens * shape.width >= 1024 else 2), 3
    return 64, 4, 4


def states_per_split(plan: Plan) -> int:
    """Partial results that each split writes: int4_kivi has one a token group of its tile."""
    if plan.kernel is not decode_int4:
        return 1
    return int(plan.constants["ROWS"]) // int(plan.constants["HEADS"])


def extend_plan(
    target: str, shape: Shape, rows: int, splits: int, causal: bool, tuning: Tuning | None = None
) -> Plan:
    """Settings of `paged_extend`; `rows` of the largest sequence: new tokens times group."""
    block_m, block_n, warps, stages = _extend_tiles(target, shape, rows)
    tuning = tuning or Tuning()
    constants = {
        "GROUP": shape.group, "D": shape.head_dim, "WIDTH": shape.width, "PAGE": shape.block_size,
        "TOKENS": shape.token_group, "BLOCK_M": tuning.block_m or block_m,
        "BLOCK_N": tuning.block_n or block_n, "SPLITS": splits, "FORMAT": shape.kv_format,
        "CAUSAL": causal, "ASM": _tricks(target, shape), **shape.features,
    }  # fmt: skip
    return Plan(extend, constants, tuning.num_warps or warps, tuning.num_stages or stages)


def _extend_tiles(target: str, shape: Shape, rows: int) -> tuple[int, int, int, int]:
    """(rows of a tile, tokens of a tile, warps, stages)."""
    few = max(ROWS_MIN, min(64, power_of_two(rows)))
    narrow = shape.head_dim <= 128
    # Short rows of codes: fewer tokens would leave less than 16 bytes to each thread.
    short = shape.parts > 1 and shape.width <= 32
    if target == "gfx942":
        if shape.value_bytes == 4:
            return min(few, 32), 32, 4, 1
        return few, (64 if short else 32), 4, 1
    if shape.value_bytes == 4:
        # Codes in rows that are not short spill registers in larger tiles, or with fewer threads.
        if not narrow or (shape.parts == 2 and not short):
            return ROWS_MIN, 16, 8, 2
        return ROWS_MIN, 32, (4 if shape.parts == 2 else 8), 2
    if shape.kv_format == "int4_kivi":
        return _extend_int4(target, shape, few)
    if rows <= 64:
        return few, (64 if short or (narrow and shape.kv_format == "raw") else 32), 4, 3
    if shape.kv_format != "raw":
        if target == "sm_80" or (target == "sm_90" and not narrow):
            return 32, 32, 4, 2
        if target == "sm_100" or not narrow:
            return 64, 32, 4, 2
        return 128, (64 if short else 32), 8, 2
    if not narrow:
        return 64, 32, 8, 2
    tight = {"sm_80": shape.width > 64, "sm_100": shape.width <= 64}  # in registers
    return 128, (32 if tight.get(target) else 64), 8, 3


def _extend_int4(target: str, shape: Shape, few: int) -> tuple[int, int, int, int]:
    """The same for int4_kivi, which dequantises K and V to tiles of values."""
    if shape.width <= 16:  # so short that 32 tokens have no 16 bytes for each thread
        return (min(few, 16) if target == "sm_100" else few), 64, 4, 2
    tight = target == "sm_100" or (target == "sm_80" and shape.head_dim > 128)
    return (min(few, 32) if tight else few), 32, 4, 2


def merge_plan(head_dim: int, states: int) -> Plan:
    """Settings of `merge_states`."""
    padded = power_of_two(states)
    constants: dict[str, int | bool | str] = {
        "STATES": padded, "CHUNK": min(padded, 16), "D": head_dim, "WIDTH": power_of_two(head_dim),
    }  # fmt: skip
    return Plan(merge, constants, 4 if head_dim > 128 else 2, 1)


def mla_plan(
    target: str, shape: Shape, heads: int, rope: int, splits: int, tuning: Tuning | None = None
) -> Plan:
    """Settings of `mla_decode`: few heads are bound by memory, many by arithmetic."""
    tuning = tuning or Tuning()
    small = shape.value_bytes == 4 or target == "gfx942"
    rows = ROWS_MIN if heads <= ROWS_MIN or small else 32
    tile, warps, stages = (16, 4, 1) if small else (32, 4 if rows == ROWS_MIN else 8, 2)
    constants: dict[str, int | bool | str] = {
        "HEADS": heads, "ROWS": tuning.block_m or rows, "D": shape.head_dim, "ROPE": rope,
        "PAGE": shape.block_size, "BLOCK_N": tuning.block_n or tile, "SPLITS": splits,
        "SOFTCAP": shape.softcap,
    }  # fmt: skip
    return Plan(mla_decode, constants, tuning.num_warps or warps, tuning.num_stages or stages)


def splits_for(programs: int, slots: int, tokens: int, tokens_min: int = 256) -> int:
    """How often to split the context: the fewest splits that keep a GPU within 5 % of full.

    `programs` run without splits, `slots` at once; no split gets less than `tokens_min` of
    `tokens`. Waves are what counts, as in FlashAttention's split heuristic.
    """
    most = max(1, min(SPLITS_MAX, tokens // tokens_min))
    best, best_share = 1, 0.0
    for splits in range(1, most + 1):
        waves = programs * splits / slots
        share = waves / -(-programs * splits // slots)
        if share >= 0.95:
            return splits
        if share > best_share:
            best, best_share = splits, share
    return best
