"""Eviction policies: the protocol over runs, the registry, and the heap that most of them share."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from kvstore.core.errors import InvalidRequest
from kvstore.policies.accounts import Accounts
from kvstore.policies.index import Run
from kvstore.policies.index.run import COUNTER_BITS, COUNTER_MASK
from kvstore.policies.uses import Hint, Request, Use
from kvstore.policies.worth import Worth

M = TypeVar("M", bound="Model")


class EvictionPolicy(Protocol):
    """Orders the leaf runs of one tier's pool by what is lost with them.

    `Residency` keeps the shared history: `Run.hits`, `Run.touched` and `Run.policy`, the newest
    `Use`, are up to date when a method is called. An access to a run counts as one to its
    ancestors; only the run itself is told.
    """

    name: str

    def on_insert(self, run: Run, start: int, stop: int) -> None:
        """Blocks [start, stop) of `run` are in this tier now."""
        ...

    def on_access(self, run: Run) -> None:
        """All of `run` was asked for. Must be O(1)."""
        ...

    def on_split(self, run: Run, tail: Run) -> None:
        """`tail` is the end of what was `run`."""
        ...

    def on_merge(self, run: Run, tail: Run) -> None:
        """`run` took `tail`, which is dead, over."""
        ...

    def on_cost(self, run: Run, seconds: float) -> None:
        """Losing `run` would cost `seconds` of recomputing or restoring."""
        ...

    def on_remove(self, run: Run) -> None:
        """`run` leaves; still linked to its parent, which may take its history over."""
        ...

    def on_evicted(self, run: Run) -> None:
        """Blocks of `run`, or all of it, left this tier by a drop."""
        ...

    def first_to_go(self, run: Run) -> int:
        """The first block of leaf `run` that is worth no more than its last one."""
        ...

    def on_leaf(self, run: Run) -> None:
        """`run` has become a leaf in this tier: it may be a victim. May be told twice."""
        ...

    def on_adopt(self, runs: Sequence[Run]) -> None:
        """Runs of one tenant were found at start: `on_insert` of each, `on_leaf` of leaves."""
        ...

    def park(self, run: Run) -> None:
        """`run` cannot go now: not offered again before `unpark`."""
        ...

    def unpark(self, run: Run) -> None:
        """Whatever held `run` may be over; nothing happens if it was not parked."""
        ...

    def victims(self, tenants: Collection[str]) -> Iterator[Run]:
        """Leaf runs of `tenants`, the least worth first.

        The same run comes again until it has gone or is parked; `tenants` may shrink meanwhile.
        """
        ...


class Model(Protocol):
    """What policies of all tiers learn together from the requests."""

    def on_request(self, use: Use, request: Request) -> None:
        """A request comes; what it touches and stores from now on is remembered by `use`."""
        ...

    def on_extend(self, use: Use, digests: bytes) -> None:
        """A request's prompt, or its output, goes on with these blocks."""
        ...

    def on_finish(self, use: Use, output_tokens: int, hint: Hint) -> None:
        """A request whose output was not known has ended; what its client now says of it."""
        ...


class Context:
    """What the policies of one residency share."""

    def __init__(self, accounts: Accounts | None = None) -> None:
        self.accounts = accounts or Accounts()
        self.worth = Worth()
        self.use: Use | None = None
        self.tick: Callable[[], int] = int  # Residency's, which counts accesses.
        self.models: dict[type[Model], Model] = {}
        self._lent: dict[type[Model], Model] = {}

    def loss(self, run: Run, tier: int) -> float:
        """Seconds lost when the last READY block of `run` leaves `tier`."""
        space, position = run.root.space, run.first + run.ready - 1
        if self.worth.is_plain and not run.resident >> COUNTER_BITS * (tier + 1):
            first, slope = self.worth.line(space)
            return first + slope * position
        below, resident = tier + 1, run.resident >> COUNTER_BITS * (tier + 1)
        if not resident:
            return self.worth.loss(space, position, tier, None)
        # Chains are copied from their start: the last block lies below if all of the run does.
        whole = resident & COUNTER_MASK == run.ready * space.shard_count
        return self.worth.loss(space, position, tier, below if whole else None)

    def model(self, kind: type[M]) -> M:
        """The one model of a kind, made when it is first asked for; it outlives its policies."""
        found = self._lent.get(kind) or self.models.get(kind)
        if found is None:
            found = self.models[kind] = kind()
        assert isinstance(found, kind)
        return found

    def borrow(self, model: Model) -> None:
        """Policies made from now on use this model, which another residency tells of requests.

        A `Use` must then `follow` the other's of the same request.
        """
        self.models.pop(type(model), None)
        self._lent[type(model)] = model


_FACTORIES: dict[str, Callable[[int, Context], EvictionPolicy]] = {}
_OFFLINE: set[str] = set()


def register(name: str, offline: bool = False) -> Callable[[Any], Any]:
    """Class decorator: files a policy under `name`; it is made with its tier's number and context.

    An `offline` one needs to know what comes, and is for simulations only.
    """

    def file(factory: Any) -> Any:
        assert name not in _FACTORIES, f"two policies are named {name}"
        factory.name = name
        _FACTORIES[name] = factory
        if offline:
            _OFFLINE.add(name)
        return factory

    return file


def policy_names(offline: bool = False) -> list[str]:
    """Names that `create` knows, sorted; with the `offline` ones if wanted."""
    return sorted(name for name in _FACTORIES if offline or name not in _OFFLINE)


def create(name: str, tier: int = 0, context: Context | None = None) -> EvictionPolicy:
    """A new policy for one pool of `tier`; raises InvalidRequest for an unknown name."""
    factory = _FACTORIES.get(name)
    if factory is None:
        known = ", ".join(policy_names())
        raise InvalidRequest(f"policy {name!r} is unknown; choose one of: {known}")
    return factory(tier, context or Context())


class LeafHeap:
    """Leaf runs of one tier by a key that only grows, one heap a tenant.

    An entry's key is made good when it comes to the top, so an access costs nothing here. Entries
    of runs that are gone, no leaves any more or parked are dropped at the top.
    """

    def __init__(self, tier: int, key: Callable[[Run], Any]):
        self._tier = tier
        self._key = key
        self._heaps: dict[str, list[tuple[Any, Run]]] = {}
        self._limits: dict[str, int] = {}
        self._parked: set[Run] = set()

    def push(self, run: Run) -> None:
        """Files a run that is a leaf now."""
        tenant = run.root.space.tenant
        heap = self._heaps.setdefault(tenant, [])
        heapq.heappush(heap, (self._key(run), run))
        if len(heap) > self._limits.get(tenant, 64):
            self._compact(tenant, heap)

    def push_many(self, runs: Sequence[Run]) -> None:
        """Files leaf runs of one tenant."""
        if not runs:
            return
        tenant = runs[0].root.space.tenant
        heap = self._heaps.setdefault(tenant, [])
        if len(runs) < len(heap) // 8:
            for run in runs:
                self.push(run)
            return
        heap.extend([(self._key(run), run) for run in runs])
        self._compact(tenant, heap)

    def park(self, run: Run) -> None:
        self._parked.add(run)

    def unpark(self, run: Run) -> None:
        if run in self._parked:
            self._parked.discard(run)
            if run.is_leaf(self._tier):
                self.push(run)

    def forget(self, run: Run) -> None:
        """Drops what is kept for a run that goes."""
        self._parked.discard(run)

    def first(self, tenants: Collection[str]) -> Run | None:
        """The run with the smallest key among `tenants`' leaves; it stays filed."""
        best: tuple[Any, Run] | None = None
        for tenant in tenants:
            heap = self._heaps.get(tenant)
            if heap:
                top = self._settle(heap)
                if top is None:
                    del self._heaps[tenant]
                elif best is None or top < best:
                    best = top
        return None if best is None else best[1]

    def _settle(self, heap: list[tuple[Any, Run]]) -> tuple[Any, Run] | None:
        """Makes the top entry a true one."""
        while heap:
            top = heap[0]
            run = top[1]
            if run in self._parked or not run.is_leaf(self._tier):
                heapq.heappop(heap)
                continue
            key = self._key(run)
            if key == top[0]:
                return top
            heapq.heapreplace(heap, (key, run))
        return None

    def _compact(self, tenant: str, heap: list[tuple[Any, Run]]) -> None:
        """Drops dead and double entries once they may be a fifth of all."""
        # A dict keeps the order, which must not depend on addresses: a replay has others.
        live = dict.fromkeys(run for _, run in heap if run.is_leaf(self._tier))
        heap[:] = [(self._key(run), run) for run in live if run not in self._parked]
        heapq.heapify(heap)
        self._limits[tenant] = len(heap) + len(heap) // 4 + 64


class HeapPolicy:
    """Base of policies that rank leaf runs by one key; a subclass gives `key` and what moves it."""

    name = ""

    def __init__(self, tier: int, context: Context):
        self.tier = tier
        self.context = context
        self._leaves = LeafHeap(tier, self.key)

    def key(self, run: Run) -> Any:
        """What ranks a run: the smallest goes first.

        A key that shrinks while the run is a leaf shows once the run is filed again, which
        `on_leaf` does: it is told after blocks left the run's end.
        """
        raise NotImplementedError

    def last_position(self, run: Run) -> int:
        """Position in its chain of the run's last READY block."""
        return run.first + run.ready - 1

    def loss(self, run: Run) -> float:
        """Seconds lost when the run's last READY block leaves this tier."""
        return self.context.loss(run, self.tier)

    def on_insert(self, run: Run, start: int, stop: int) -> None:
        pass

    def on_access(self, run: Run) -> None:
        pass

    def on_split(self, run: Run, tail: Run) -> None:
        # The anchors that held the run may be the tail's now.
        self._leaves.unpark(run)

    def on_merge(self, run: Run, tail: Run) -> None:
        self._leaves.forget(tail)

    def on_cost(self, run: Run, seconds: float) -> None:
        pass

    def on_remove(self, run: Run) -> None:
        self._leaves.forget(run)

    def on_evicted(self, run: Run) -> None:
        pass

    def first_to_go(self, run: Run) -> int:
        return 0

    def on_leaf(self, run: Run) -> None:
        self._leaves.push(run)

    def on_adopt(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self.on_insert(run, 0, run.ready)
        self._leaves.push_many([run for run in runs if run.is_leaf(self.tier)])

    def park(self, run: Run) -> None:
        self._leaves.park(run)

    def unpark(self, run: Run) -> None:
        self._leaves.unpark(run)

    def victims(self, tenants: Collection[str]) -> Iterator[Run]:
        while (run := self._leaves.first(tenants)) is not None:
            yield run
