"""The exact optimum for seconds, by linear programming; needs SciPy (`kvstore-daemon[bounds]`).

The flow that `bounds` bounds by prices, solved: a variable for each stretch of blocks that a
request finds, at most the capacity kept at any time, and no stretch kept without those before it in
its prompt. The value is the optimum where the solution is whole, and an upper bound in any case.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from kvstore.core.errors import KVStoreError
from kvstore.policies.cost import CallCost
from kvstore.replay.bounds import DEFAULT_COST, Reuses, block_seconds, find_reuses
from kvstore.replay.columns import TraceColumns


class SolverFailed(KVStoreError):
    """The solver gave up; the bounds by prices hold without it."""


def exact_upper(trace: TraceColumns, capacity: int, cost: CallCost = DEFAULT_COST) -> float:
    """The largest share of prefill seconds that any policy can save."""
    seconds = block_seconds(trace, cost)
    reuses = find_reuses(trace, seconds)
    total = max(float(seconds.sum()), 1e-12)
    return _solve(reuses, capacity, trace.request_count) / total if len(reuses.start) else 0.0


def _solve(reuses: Reuses, capacity: int, request_count: int) -> float:
    """Seconds saved by the best flow.

    After the kept shares x of the stretches come the places y in use after each request:
    y[t] - y[t-1] is what comes at t less what goes, and at most the capacity is in use.
    """
    count = len(reuses.start)
    rows, columns = np.arange(count), np.arange(request_count)
    balance = coo_array(
        (
            np.concatenate([
                reuses.blocks, -reuses.blocks, -np.ones(request_count), np.ones(request_count - 1),
            ]),
            (
                np.concatenate([reuses.start, reuses.stop, columns, columns[1:]]),
                np.concatenate([rows, rows, count + columns, count + columns[:-1]]),
            ),
        ),
        shape=(request_count, count + request_count),
    )  # fmt: skip
    order = np.flatnonzero(reuses.row[1:] == reuses.row[:-1])
    pairs = np.arange(len(order))
    closed = coo_array(
        (
            np.concatenate([np.ones(len(order)), -np.ones(len(order))]),
            (np.concatenate([pairs, pairs]), np.concatenate([order + 1, order])),
        ),
        shape=(len(order), count + request_count),
    )
    found = linprog(
        np.concatenate([-reuses.seconds, np.zeros(request_count)]),
        A_ub=closed if len(order) else None,
        b_ub=np.zeros(len(order)) if len(order) else None,
        A_eq=balance,
        b_eq=np.zeros(request_count),
        bounds=[(0, 1)] * count + [(0, capacity)] * request_count,
        method="highs",
    )
    if found.status != 0:
        raise SolverFailed(f"the solver gave up ({found.message}); use the bounds by prices")
    return float(-found.fun)
