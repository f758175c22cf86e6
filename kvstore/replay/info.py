"""What a trace holds and how much of it any cache could serve: figures of `kvstore trace info`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvstore.replay.formats import TraceRequest

QUANTILES = (5, 25, 50, 75, 90, 99, 100)


class _Ceilings:
    """Hits of a cache that never evicts."""

    def __init__(self) -> None:
        self.references: dict[int, int] = {}
        self.full: set[int] = set()
        self.reference_count = self.hit_blocks = self.hit_tokens = 0
        self.prefix_tokens = self.full_prefix_tokens = 0
        self.deeper_tokens = self.deeper_hit_tokens = 0

    def add(self, request: TraceRequest) -> None:
        closed = True
        for block, hash_id in enumerate(request.hash_ids):
            seen = self.references.get(hash_id, 0)
            self.references[hash_id] = seen + 1
            closed = closed and seen > 0
            tokens = request.covered_tokens(block)
            self.prefix_tokens += tokens * closed
            self.hit_blocks += seen > 0
            self.hit_tokens += tokens * (seen > 0)
            if block:
                self.deeper_tokens += tokens
                self.deeper_hit_tokens += tokens * closed
        self.reference_count += len(request.hash_ids)
        self._add_full(request)

    def _add_full(self, request: TraceRequest) -> None:
        ids = request.hash_ids[: request.full_blocks]
        matched = next((i for i, x in enumerate(ids) if x not in self.full), len(ids))
        self.full_prefix_tokens += matched * request.block_size
        self.full.update(ids[matched:])


def trace_info(requests: Iterable[TraceRequest]) -> dict[str, Any]:
    """Figures of a trace; ratios are 0 to 1, `token` ones over all input tokens.

    `ceiling_*` are the hits of a cache that keeps everything: no policy can have more.
    `ceiling_token_hit_ratio` counts full blocks along an unbroken prefix, as the store does.
    """
    ceilings, inputs, outputs, times = _Ceilings(), [], [], []
    sessions: set[tuple[str, str]] = set()
    block_size = 0
    for request in requests:
        ceilings.add(request)
        inputs.append(request.input_length)
        outputs.append(request.output_length)
        times.append(request.timestamp)
        sessions.add((request.tenant, request.session))
        block_size = request.block_size
    tokens = max(sum(inputs), 1)
    references = np.array(list(ceilings.references.values()), dtype=np.int64)
    return {
        "requests": len(inputs),
        "span_seconds": (times[-1] - times[0]) / 1000 if times else 0.0,
        "block_size": block_size,
        "input_tokens": sum(inputs),
        "output_tokens": sum(outputs),
        "block_references": ceilings.reference_count,
        "unique_blocks": len(references),
        "unique_full_blocks": len(ceilings.full),
        "tenant_count": len({tenant for tenant, _ in sessions}),
        "session_count": len({pair for pair in sessions if pair[1]}),
        "input_length_quantiles": _quantiles(inputs),
        "output_length_quantiles": _quantiles(outputs),
        "ceiling_block_hit_ratio": _ratio(ceilings.hit_blocks, ceilings.reference_count),
        "ceiling_any_token_hit_ratio": ceilings.hit_tokens / tokens,
        "ceiling_partial_token_hit_ratio": ceilings.prefix_tokens / tokens,
        "ceiling_token_hit_ratio": ceilings.full_prefix_tokens / tokens,
        "ceiling_below_first_block_token_hit_ratio": _ratio(
            ceilings.deeper_hit_tokens, ceilings.deeper_tokens
        ),
        "one_shot_block_ratio": _ratio(int((references == 1).sum()), len(references)),
        "same_time_ratio": _ratio(len(times) - len(set(times)), len(times)),
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _quantiles(values: list[int]) -> dict[str, int]:
    if not values:
        return {}
    points = np.percentile(values, QUANTILES)
    return {f"p{q}": round(v) for q, v in zip(QUANTILES, points, strict=True)}
