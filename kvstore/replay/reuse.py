"""How a trace's prompts come back: what a generator has to be like, and a policy to live from."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.replay.columns import TraceColumns, stack_distances

FRACTIONS = (0.01, 0.05, 0.1, 0.25, 0.5)
HORIZONS_SECONDS = (10, 60, 300, 600)


def reuse_info(trace: TraceColumns) -> dict[str, Any]:
    """Figures of reuse; quantiles are maps such as {"p50": 3.0}, shares 0 to 1."""
    return {
        **_block_figures(trace),
        **_arrival_figures(trace),
        **_tree_figures(trace),
        **_request_figures(trace),
    }


def quantiles(values: np.ndarray, points: tuple[float, ...]) -> dict[str, float]:
    """Percentiles by name; none of nothing."""
    if not len(values):
        return {}
    found = np.percentile(values, points)
    return {f"p{q:g}": round(float(v), 3) for q, v in zip(points, found, strict=True)}


def _share(mask: np.ndarray) -> float:
    return float(mask.mean()) if len(mask) else 0.0


def _block_figures(trace: TraceColumns) -> dict[str, Any]:
    again = trace.before >= 0
    distances = stack_distances(trace.before)[again]
    times = trace.times[trace.owners]
    waits = times[again] - times[trace.before[again]]
    references = np.bincount(trace.blocks) if len(trace.blocks) else np.zeros(0, np.int64)
    unique = trace.unique_blocks
    return {
        "references_per_block_quantiles": quantiles(references, (50, 90, 99, 99.9, 100)),
        "stack_distance_quantiles": quantiles(distances, (5, 25, 50, 75, 90, 99)),
        "stack_distance_share_below": {
            f"{fraction:.0%}": _share(distances < fraction * unique) for fraction in FRACTIONS
        },
        "reuse_seconds_quantiles": quantiles(waits, (25, 50, 75, 90, 95, 99)),
        "reuse_share_within_seconds": {str(h): _share(waits <= h) for h in HORIZONS_SECONDS},
    }


def _arrival_figures(trace: TraceColumns) -> dict[str, Any]:
    gaps = np.diff(trace.times)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return {
        "interarrival_mean_seconds": mean,
        "interarrival_cv": float(gaps.std() / mean) if mean else 0.0,
    }


def _tree_figures(trace: TraceColumns) -> dict[str, Any]:
    """The prefix tree of all ids; a block's parent is the block before it."""
    first = np.flatnonzero(trace.before < 0)
    inner = first[trace.depths[first] > 0]
    children = np.bincount(trace.blocks[inner - 1], minlength=1)
    return {
        "root_count": int((trace.depths[first] == 0).sum()),
        "branching_block_count": int((children > 1).sum()),
        "max_children": int(children.max()),
    }


def matched_blocks(trace: TraceColumns) -> np.ndarray:
    """Leading blocks of each request that were seen before it."""
    matched = trace.counts().copy()
    new = np.flatnonzero(trace.before < 0)
    owners, first = np.unique(trace.owners[new], return_index=True)
    matched[owners] = trace.depths[new[first]]
    return matched


def predecessors(trace: TraceColumns, matched: np.ndarray) -> np.ndarray:
    """The last request that had all of what a request matched; -1 below two blocks."""
    found = np.full(trace.request_count, -1, dtype=np.int64)
    some = np.flatnonzero(matched >= 2)
    found[some] = trace.owners[trace.before[trace.starts[some] + matched[some] - 1]]
    return found


def turns(before: np.ndarray) -> np.ndarray:
    """How deep in a chain of predecessors each request is, from 1."""
    depth = [1] * len(before)
    for request, previous in enumerate(before.tolist()):
        if previous >= 0:
            depth[request] = depth[previous] + 1
    return np.array(depth)


def _request_figures(trace: TraceColumns) -> dict[str, Any]:
    counts, matched = trace.counts(), matched_blocks(trace)
    before = predecessors(trace, matched)
    again = before >= 0
    previous = before[again]
    gaps = trace.times[again] - trace.times[previous]
    return {
        "blocks_per_request_quantiles": quantiles(counts, (50, 90, 99, 100)),
        "matching_request_ratio": _share(again),
        "matched_blocks_quantiles": quantiles(matched[again], (10, 25, 50, 75, 90, 99)),
        "predecessor_gap_seconds_quantiles": quantiles(gaps, (10, 25, 50, 75, 90, 99)),
        "growth_blocks_quantiles": quantiles(counts[again] - counts[previous], (50, 75, 90, 99)),
        "new_blocks_quantiles": quantiles(counts - matched, (50, 75, 90, 99)),
        "turn_quantiles": quantiles(turns(before), (75, 90, 99, 100)),
        "whole_prefix_ratio": _share(matched[again] >= counts[previous] - 1),
    }
