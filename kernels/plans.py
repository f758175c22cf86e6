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


def decode_plan(target: str, shape: Shape, splits: int, tuning: Tuning | None = None) -> Plan:
    """Settings of `paged_decode`: small tiles, many bytes in flight."""
    block_n, warps, stages = _decode_tiles(target, shape)
    tuning = tuning or Tuning()
    block_n, warps = tuning.block_n or block_n, tuning.num_warps or warps
    constants = {
        "GROUP": shape.group, "ROWS": max(ROWS_MIN, power_of_two(shape.group)),
        "D": shape.head_dim, "WIDTH": shape.width, "PAGE": shape.block_size,
        "BLOCK_N": block_n, "SPLITS": splits, "ASM": target.startswith("sm_"), **shape.features,
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
    if target == "gfx942":
        return (32 if shape.value_bytes * shape.width > 256 else 64), 4, 2
    if shape.kv_format == "raw":
        if shape.value_bytes == 4 or shape.head_dim > 128:
            return 32, 4, 3
        return 64, 4, 3
    if shape.kv_format == "int4_kivi":
        # As many token groups as there are rows left by the heads; see `jit/decode_int4.py`.
        groups = max(1, ROWS_MIN // power_of_two(shape.group))
        tokens = min(128, groups * shape.token_group)
        return tokens, (4 if tokens * shape.width >= 1024 else 2), 3
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
        "CAUSAL": causal, "ASM": target.startswith("sm_"), **shape.features,
    }  # fmt: skip
    return Plan(extend, constants, tuning.num_warps or warps, tuning.num_stages or stages)


def _extend_tiles(target: str, shape: Shape, rows: int) -> tuple[int, int, int, int]:
    """(rows of a tile, tokens of a tile, warps, stages)."""
    few = max(ROWS_MIN, min(64, power_of_two(rows)))
    narrow = shape.head_dim <= 128
    if shape.value_bytes == 4:
        return min(few, 32), 32, 4, 2
    if target == "gfx942":
        return few, 32, 4, 1
    if shape.kv_format == "int4_kivi":
        return (min(few, 32) if target == "sm_100" else few), 32, 4, 2
    if rows <= 64:
        return few, (64 if narrow and shape.kv_format == "raw" else 32), 4, 3
    if shape.kv_format != "raw":
        if target == "sm_80":
            return 32, 32, 4, 2
        return (128, 32, 8, 2) if narrow and target != "sm_100" else (64, 32, 4, 2)
    if not narrow:
        return 64, 32, 4, 2
    return (128, 32, 8, 3) if target == "sm_80" else (128, 64, 8, 3)


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
