"""Traces made from traces: a cut in time, another block size, ticks spread out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import groupby

import msgspec

from kvstore.core.errors import InvalidRequest
from kvstore.replay.formats import TraceRequest


def cut_time(requests: Iterable[TraceRequest], seconds: float) -> Iterator[TraceRequest]:
    """The requests of the first `seconds` of a trace."""
    start = None
    for request in requests:
        start = request.timestamp if start is None else start
        if request.timestamp - start >= seconds * 1000:
            return
        yield request


def recut_blocks(requests: Iterable[TraceRequest], block_size: int) -> Iterator[TraceRequest]:
    """The same prompts in smaller blocks.

    Exact: equal ids mean equal prefixes, so the parts of a block are equal where the block is.
    """
    for request in requests:
        if request.block_size % block_size:
            raise InvalidRequest(
                f"block_size {block_size} does not divide the trace's {request.block_size}; "
                "blocks can be cut into equal parts only"
            )
        parts = request.block_size // block_size
        count = -(-request.input_length // block_size)
        ids = [hash_id * parts + i for hash_id in request.hash_ids for i in range(parts)]
        yield msgspec.structs.replace(request, hash_ids=ids[:count], block_size=block_size)


def spread_ticks(requests: Iterable[TraceRequest], seed: int) -> Iterator[TraceRequest]:
    """Requests of one timestamp spread evenly at random up to the next timestamp.

    Recorders that write coarse clock ticks make bursts that nobody sent.
    """
    rng = random.Random(seed)
    groups = ((time, list(same)) for time, same in groupby(requests, key=lambda r: r.timestamp))
    before, gap = next(groups, None), 0.0
    while before is not None:
        after = next(groups, None)
        gap = after[0] - before[0] if after else gap
        yield from _spread(before[1], gap, rng)
        before = after


def _spread(requests: list[TraceRequest], gap: float, rng: random.Random) -> Iterator[TraceRequest]:
    moves = sorted(rng.uniform(0, gap) for _ in requests)
    for request, move in zip(requests, moves, strict=True):
        yield msgspec.structs.replace(request, timestamp=round(request.timestamp + move, 3))
