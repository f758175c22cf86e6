"""Cells: how a run's places are laid out, int64s in the order [block][tier][shard]."""

from __future__ import annotations

import numpy as np

from kvstore.policies.index.run import ABSENT, COUNTER_BITS, PLACE_BYTES, Run


def stride_of(run: Run, tier_count: int) -> int:
    """Bytes of one block's cells."""
    return PLACE_BYTES * tier_count * run.root.space.shard_count


def place_bytes(run: Run, start: int, stop: int, stride: int) -> bytes:
    """Cells of blocks [start, stop), READY and STAGING alike."""
    ready = run.ready
    if stop <= ready:
        whole = stop - start == ready
        return run.places if whole else run.places[start * stride : stop * stride]
    assert run.staging is not None
    staged = run.staging.places
    tail = bytes(staged[max(0, start - ready) * stride : (stop - ready) * stride])
    return run.places[start * stride :] + tail if start < ready else tail


def count_resident(cells: bytes, tier_count: int, shards: int) -> int:
    """How many cells hold a place, packed as in `Run.resident`."""
    if tier_count == 1 and ABSENT not in cells:
        return len(cells) // PLACE_BYTES
    grid = np.frombuffer(cells, np.int64).reshape(-1, tier_count, shards)
    counts = (grid >= 0).sum(axis=(0, 2)).tolist()
    return sum(count << COUNTER_BITS * tier for tier, count in enumerate(counts))


def stretches(wanted: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) of each stretch of True in a mask."""
    if wanted.all():
        return [(0, len(wanted))] if len(wanted) else []
    edges = (np.flatnonzero(wanted[1:] != wanted[:-1]) + 1).tolist()
    if wanted[0]:
        edges.insert(0, 0)
    if len(edges) % 2:
        edges.append(len(wanted))
    return list(zip(edges[::2], edges[1::2], strict=True))
