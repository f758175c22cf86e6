"""Which region of a pool to empty so that a class without room gets a chunk. Pure.

A region is an aligned block of the wanted chunk's size, or the larger chunk it lies in. The one
whose emptying moves the fewest bytes wins. Chunks of the class itself do not count as a gain,
unless they are nearly empty.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from kvstore.tiers.chunks import SlotClass

NEARLY_EMPTY = 16
"""A chunk with at most one slot in this many taken is nearly empty."""

DRAIN_PATIENCE = 4096
"""A drain ends when so many reservations passed since its class last asked for it."""


class Drain:
    """A region being emptied: granules [start, stop), and its free blocks, kept from others."""

    __slots__ = ("asked_at", "start", "stop", "withheld", "withheld_granules")

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.withheld: list[tuple[int, int]] = []
        self.withheld_granules = 0
        self.asked_at = 0

    @property
    def complete(self) -> bool:
        return self.withheld_granules == self.stop - self.start

    def withhold(self, at: int, order: int) -> None:
        self.withheld.append((at, order))
        self.withheld_granules += 1 << order


def cheapest_region(
    wanted: SlotClass,
    slot_bytes: list[int],
    class_of: array[int],
    order_of: array[int],
    slots: array[int],
    free: array[int],
    drains: Iterable[Drain],
    shift: int,
) -> tuple[int, int] | None:
    """Granules [start, stop) to empty for class `wanted`; None if no region would be a gain.

    The arrays are the slab's, set at the first granule of each chunk; `slot_bytes` is by class.
    """
    classes = np.frombuffer(class_of, np.int16)
    heads = np.flatnonzero(classes >= 0)
    owner = classes[heads]
    orders = np.frombuffer(order_of, np.int8)[heads].astype(np.int64)
    total = np.frombuffer(slots, np.intc)[heads].astype(np.int64)
    taken = total - np.frombuffer(free, np.intc)[heads]
    cost = taken * np.asarray(slot_bytes, np.int64)[owner]
    pointless = (owner == wanted.number) & (taken * NEARLY_EMPTY > total)
    drains = list(drains)
    for order in range(wanted.order, -1, -1):
        if 1 << order + shift < wanted.least_bytes:
            break
        costs = _region_costs(order, len(class_of), heads, orders, cost, pointless)
        for drain in drains:
            costs[drain.start >> order : -(-drain.stop >> order)] = np.inf
        if len(costs) and np.isfinite(least := costs.min()):
            start = int(np.flatnonzero(costs == least)[0]) << order
            return _whole_chunk(start, order, heads, orders)
    return None


def _region_costs(
    order: int,
    granules: int,
    heads: np.ndarray,
    orders: np.ndarray,
    cost: np.ndarray,
    pointless: np.ndarray,
) -> np.ndarray:
    """Bytes to move out of each aligned region of `order`; infinite where that gains nothing."""
    count = granules >> order
    regions = heads >> order
    costs = np.bincount(regions, weights=cost, minlength=count)[:count]
    costs[regions[pointless & (regions < count)]] = np.inf
    for at in np.flatnonzero(orders > order):
        # A larger chunk is emptied whole, so all but its first region are left out.
        costs[regions[at] + 1 : regions[at] + (1 << int(orders[at]) - order)] = np.inf
    return costs


def _whole_chunk(start: int, order: int, heads: np.ndarray, orders: np.ndarray) -> tuple[int, int]:
    at = np.flatnonzero(heads == start)
    if len(at):
        order = max(order, int(orders[at[0]]))
    return start, start + (1 << order)
