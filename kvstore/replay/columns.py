"""`TraceColumns`: a trace as arrays, one entry a request or one a block reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.core.errors import InvalidRequest
from kvstore.replay.formats import TraceRequest


class TraceColumns(NamedTuple):
    """A whole trace; `times` are seconds since its first request.

    References lie one after the other, a request's in the order of its prompt: those of request
    `r` are [`starts[r]`, `starts[r + 1]`). `blocks` numbers the ids from 0 in the order of first
    use; `before` and `after` lead to a block's reference before and after, -1 where there is none.
    """

    block_size: int
    times: np.ndarray
    inputs: np.ndarray
    outputs: np.ndarray
    starts: np.ndarray
    owners: np.ndarray
    depths: np.ndarray
    blocks: np.ndarray
    before: np.ndarray
    after: np.ndarray

    @property
    def request_count(self) -> int:
        return len(self.inputs)

    @property
    def unique_blocks(self) -> int:
        """Ids, the last and partly filled of a request among them."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    @property
    def tokens(self) -> np.ndarray:
        """Input tokens that each reference covers."""
        left = self.inputs[self.owners] - self.depths * self.block_size
        covered: np.ndarray = np.minimum(left, self.block_size)
        return covered

    @property
    def full(self) -> np.ndarray:
        """Which references are of blocks that the input fills; only these can be stored."""
        whole: np.ndarray = self.tokens == self.block_size
        return whole

    def counts(self) -> np.ndarray:
        """Blocks of each request."""
        return np.diff(self.starts)


def trace_columns(requests: Sequence[TraceRequest], by_tenant: bool = False) -> TraceColumns:
    """The columns of a checked trace; raises InvalidRequest when it has no request.

    `by_tenant` keeps equal ids of several tenants apart, as a store does.
    """
    if not requests:
        raise InvalidRequest("the trace holds no request; a trace has one JSON object a line")
    lengths = np.array([len(r.hash_ids) for r in requests], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.fromiter((i for r in requests for i in r.hash_ids), np.int64, int(starts[-1]))
    owners = np.repeat(np.arange(len(requests)), lengths)
    if by_tenant:
        tenants = {r.tenant: 0 for r in requests}
        numbers = {tenant: number for number, tenant in enumerate(tenants)}
        own = np.array([numbers[r.tenant] for r in requests])
        ids = ids * len(numbers) + own[owners]
    times = np.array([r.timestamp for r in requests], dtype=np.float64) / 1000
    blocks = _numbered(ids)
    before, after = _neighbours(blocks)
    return TraceColumns(
        requests[0].block_size,
        times - times[0],
        np.array([r.input_length for r in requests], dtype=np.int64),
        np.array([r.output_length for r in requests], dtype=np.int64),
        starts,
        owners,
        np.arange(len(ids)) - starts[owners],
        blocks,
        before,
        after,
    )


def _numbered(ids: np.ndarray) -> np.ndarray:
    """Numbers from 0 in the order of first use."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    ranks = np.empty(len(first), dtype=np.int64)
    ranks[np.argsort(first)] = np.arange(len(first))
    numbers: np.ndarray = ranks[inverse]
    return numbers


def _neighbours(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the same block was referenced before, and is next."""
    order = np.argsort(blocks, kind="stable")
    same = blocks[order[1:]] == blocks[order[:-1]]
    before = np.full(len(blocks), -1, dtype=np.int64)
    after = before.copy()
    before[order[1:][same]] = order[:-1][same]
    after[order[:-1][same]] = order[1:][same]
    return before, after


def stack_distances(before: np.ndarray) -> np.ndarray:
    """Distinct blocks between each reference and the one before of the same block; -1 if none.

    What lies between is counted by its first reference there: those before `i` whose own
    predecessor is not after `before[i]`, less the `before[i] + 1` that lie before it.
    """
    distances: np.ndarray = _smaller_before(before) - before - 1
    distances[before < 0] = -1
    return distances


def _smaller_before(values: np.ndarray) -> np.ndarray:
    """For each entry, how many before it are smaller; -1s may be counted either way.

    A merge sort from the bottom: at each level entries of a right half count their left half.
    """
    size = 1 << max(len(values) - 1, 1).bit_length()
    ranks = np.full(size, size, dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    ranks[len(values) :] = np.arange(len(values), size)
    counts = np.zeros(size, dtype=np.int64)
    width = 1
    while width < size:
        rows = ranks.reshape(-1, 2 * width)
        order = np.argsort(rows, axis=1, kind="stable")
        left = order < width
        below = np.cumsum(left, axis=1)
        into = counts.reshape(-1, 2 * width)
        row, column = np.nonzero(~left)
        into[row, order[row, column]] += below[row, column]
        width *= 2
    found: np.ndarray = counts[: len(values)]
    return found
