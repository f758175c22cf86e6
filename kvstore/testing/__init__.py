"""The whole store in the caller's process, and parts that fail on purpose: for users' own tests.

    with InProcessStore("64MiB") as store, store.client() as client:
        space = client.attach(spec)
        space.put(token_ids, blocks)
        assert space.lookup(token_ids).matched_tokens == len(token_ids)

The flows, the service and the client are those of the daemon; only sockets and threads are left
out. With a `ManualClock` nothing happens by itself: time passes in `advance`. A `SimulatedMover`
ends copies late and out of order, `FaultyTier` and `ThrottledTier` go around a `MemoryTier`.
"""

from kvstore.core.clock import ManualClock
from kvstore.testing.mover import SimulatedMover
from kvstore.testing.store import InProcessStore
from kvstore.tiers.faulty import Fault, FaultBudget, FaultyTier, SimulatedCrash
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.throttle import ThrottledTier

__all__ = [
    "Fault",
    "FaultBudget",
    "FaultyTier",
    "InProcessStore",
    "ManualClock",
    "MemoryTier",
    "SimulatedCrash",
    "SimulatedMover",
    "ThrottledTier",
]
