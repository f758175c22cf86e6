"""Reference counts: how often each block was asked for, in the cache or not."""

from __future__ import annotations

from bisect import bisect_left

from kvstore.policies.index import Run
from kvstore.policies.uses import Hint, Request, Use, digest_words

BLOCKS_MAX = 1 << 20


class ReferenceCounts:
    """Counts by prefix digest that outlive eviction, so that they do not depend on the policy.

    Past `BLOCKS_MAX` blocks all counts are halved, and blocks counted once forgotten.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def on_request(self, use: Use, request: Request) -> None:
        counts = self._counts
        digests = digest_words(request.digests)
        use.counts = counted = [counts.get(digest, 0) + 1 for digest in digests]
        counts.update(zip(digests, counted, strict=True))
        if len(counts) > BLOCKS_MAX:
            self._counts = {digest: n >> 1 for digest, n in counts.items() if n > 1}

    def on_extend(self, use: Use, digests: bytes) -> None:
        use.counts = [*use.counts, *(1 for _ in digest_words(digests))]

    def on_finish(self, use: Use, output_tokens: int, hint: Hint) -> None:
        pass


def count_of(run: Run, position: int) -> int:
    """How often the block at `position` of its chain had been asked for when it last was."""
    use = run.policy
    if use is None or (grain := position // use.grain) >= len(use.counts):
        return run.hits + 1
    count: int = use.counts[grain]
    return count


def first_counted_alike(run: Run) -> int:
    """The first block of `run` with its last READY block's count; counts fall along a chain."""
    use, last = run.policy, run.first + run.ready - 1
    if use is None or (end := last // use.grain) >= len(use.counts):
        return 0
    start = run.first // use.grain
    first = bisect_left(use.counts, -use.counts[end], start, end, key=lambda count: -count)
    grain: int = use.grain
    return max(0, first * grain - run.first)
