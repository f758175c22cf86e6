"""`Preset`: the parameters of generated workloads, and the files that they are read from."""

from __future__ import annotations

import math
from bisect import bisect_right
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from kvstore.core.errors import InvalidRequest
from kvstore.replay.formats import BLOCK_SIZE

PRESETS = Path(__file__).parent / "data"
Table = tuple[tuple[float, float], ...]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of session. Tables are [percent, value] pairs, of which values are drawn.

    A session's first prompt is a shared prefix (`shared_tokens`, one of `variants` of the tenant,
    or of everybody) and `first_tokens`. After `gap_seconds` it goes on with the probability in
    `continue_by_turn`, whose last entry holds from there on: the next prompt is the one before plus
    `growth_tokens`; with `branch_share` it keeps only `branch_keep` of the prompt before, with
    `compact_share` only the shared prefix, and begins anew with `first_tokens`.
    `starts` is when sessions begin, as a share of the whole span.
    With `documents`, so many are alive at once, each for `document_seconds` on average: the first
    prompt is one of them, all of it shared, and `first_tokens` is how long each is.
    """

    name: str
    share: Positive
    first_tokens: Table
    output_tokens: Table
    gap_seconds: Table = ((0, 60), (100, 60))
    growth_tokens: Table = ((0, 0), (100, 0))
    continue_by_turn: tuple[Share, ...] = (0.0,)
    branch_share: Share = 0.0
    branch_keep: Table = ((0, 0.0), (100, 1.0))
    compact_share: Share = 0.0
    starts: Table = ((0, 0.0), (100, 1.0))
    variants: Count = 1
    shared_tokens: Table = ((0, 0), (100, 0))
    shared_by_all: bool = False
    documents: Annotated[int, msgspec.Meta(ge=0)] = 0
    document_seconds: Positive = 3600.0


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload. `burst` and `dwell_seconds` make arrivals a Markov-modulated Poisson process.

    In it, a busy state has `burst` times the rate of a quiet one; 1 is a plain Poisson process.
    """

    description: str
    sessions: Count
    span_seconds: Positive
    kinds: tuple[Kind, ...]
    block_size: Count = BLOCK_SIZE
    tick_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    tenants: Count = 1
    tenant_skew: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    burst: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    dwell_seconds: Positive = 60.0


def preset_names() -> list[str]:
    """Shipped presets."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_preset(name: str) -> Preset:
    """A shipped preset by name, or one of a TOML file by its path; raises InvalidRequest."""
    path = PRESETS / f"{name}.toml"
    if name not in preset_names():
        path = Path(name)
        if not path.is_file():
            raise InvalidRequest(
                f"preset {name!r} is unknown; choose one of {', '.join(preset_names())}, "
                "or name a TOML file"
            )
    try:
        preset = msgspec.toml.decode(path.read_bytes(), type=Preset)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"{path} is no preset: {str(error)[:1].lower()}{str(error)[1:]}"
        ) from None
    _check(preset, path)
    return preset


def _check(preset: Preset, path: Path) -> None:
    if not preset.kinds:
        raise InvalidRequest(f"{path} has no [[kinds]]; a workload needs one")
    for kind in preset.kinds:
        for field in msgspec.structs.fields(kind):
            table = getattr(kind, field.name)
            if isinstance(table, tuple) and field.name != "continue_by_turn":
                _check_table(table, f"{path}, kind {kind.name}: {field.name}")
        if not kind.continue_by_turn:
            raise InvalidRequest(f"{path}, kind {kind.name}: continue_by_turn is empty; write [0]")


def _check_table(table: Table, where: str) -> None:
    percents, values = [p for p, _ in table], [v for _, v in table]
    whole = len(table) > 1 and percents[0] == 0 and percents[-1] == 100
    if not whole or percents != sorted(set(percents)) or values != sorted(values):
        raise InvalidRequest(
            f"{where} is no quantile table; write rising pairs from [0, ...] to [100, ...]"
        )
    if not all(map(math.isfinite, values)):
        raise InvalidRequest(f"{where} holds a value that is not finite")


def draw(table: Table, rng: Random) -> float:
    """A value of a quantile table; between its points as on a logarithmic scale."""
    percent = 100 * rng.random()
    i = bisect_right(table, (percent, math.inf)) - 1
    (low, a), (high, b) = table[i], table[min(i + 1, len(table) - 1)]
    part = (percent - low) / (high - low) if high > low else 0.0
    return math.sinh(math.asinh(a) + part * (math.asinh(b) - math.asinh(a)))


def zipf(weights: list[float], rng: Random) -> int:
    """An index by cumulative weights."""
    return min(bisect_right(weights, rng.random() * weights[-1]), len(weights) - 1)


def zipf_weights(count: int, skew: float) -> list[float]:
    """Cumulative weights of ranks 1 to `count`."""
    weights, total = [], 0.0
    for rank in range(1, count + 1):
        total += rank**-skew
        weights.append(total)
    return weights
