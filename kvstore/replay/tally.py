"""`Tally`: what one client counted and timed, and the report that all of them add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np


class Tally(msgspec.Struct, kw_only=True):
    """Counts and durations of one client; the sum of several is a Tally too.

    A hit is a token of an unbroken stored prefix whose bytes were restored and verified.
    `readopted_hit_tokens` are hits on blocks that no client has stored since the daemon restarted.
    """

    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    hit_tokens_by_tier: dict[str, int] = {}
    readopted_hit_tokens: int = 0
    restored_blocks: int = 0
    restored_bytes: int = 0
    verified_bytes: int = 0
    wrong_bytes: int = 0
    wrong_blocks: int = 0
    lost_leases: int = 0
    stored_blocks: int = 0
    present_blocks: int = 0
    rejected_blocks: int = 0
    stored_bytes: int = 0
    unavailable: int = 0
    lookup_seconds: list[float] = []
    restore_seconds: list[float] = []
    put_seconds: list[float] = []

    def count_tier(self, tier: str, tokens: int) -> None:
        self.hit_tokens_by_tier[tier] = self.hit_tokens_by_tier.get(tier, 0) + tokens

    def add(self, other: Tally) -> None:
        for name in self.__struct_fields__:
            if name == "hit_tokens_by_tier":
                for tier, tokens in other.hit_tokens_by_tier.items():
                    self.count_tier(tier, tokens)
            else:
                setattr(self, name, getattr(self, name) + getattr(other, name))

    def progress(self) -> tuple[int, ...]:
        """The fields of a board's row, in its order."""
        return (
            self.requests, self.input_tokens, self.hit_tokens, self.restored_bytes,
            self.wrong_bytes,
        )  # fmt: skip


def report(tallies: Sequence[Tally], wall_seconds: float) -> dict[str, Any]:
    """The figures of a replay: ratios are 0 to 1, over all input tokens."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    tokens = max(total.input_tokens, 1)
    restore_seconds, put_seconds = sum(total.restore_seconds), sum(total.put_seconds)
    return {
        "requests": total.requests,
        "input_tokens": total.input_tokens,
        "token_hit_ratio": total.hit_tokens / tokens,
        "token_hit_ratio_by_tier": {
            tier: hits / tokens for tier, hits in sorted(total.hit_tokens_by_tier.items())
        },
        "hit_tokens_by_tier": total.hit_tokens_by_tier,
        "wrong_bytes": total.wrong_bytes,
        "wrong_blocks": total.wrong_blocks,
        "readopted_hit_tokens": total.readopted_hit_tokens,
        "restored_blocks": total.restored_blocks,
        "restored_bytes": total.restored_bytes,
        "verified_bytes": total.verified_bytes,
        "stored_blocks": total.stored_blocks,
        "stored_bytes": total.stored_bytes,
        "present_blocks": total.present_blocks,
        "rejected_blocks": total.rejected_blocks,
        "lost_leases": total.lost_leases,
        "store_unavailable": total.unavailable,
        "client_count": len(tallies),
        "wall_seconds": wall_seconds,
        "restore_bytes_per_second": _ratio(total.restored_bytes, restore_seconds),
        "put_bytes_per_second": _ratio(total.stored_bytes, put_seconds),
        "lookup_p50_seconds": _quantile(total.lookup_seconds, 50),
        "lookup_p99_seconds": _quantile(total.lookup_seconds, 99),
        "restore_p50_seconds": _quantile(total.restore_seconds, 50),
        "restore_p99_seconds": _quantile(total.restore_seconds, 99),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _quantile(values: list[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
