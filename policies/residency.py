"""`Residency`: who may stay in which tier; turns events into actions, and counts every byte."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from kvstore.core.space import Space
from kvstore.policies import (  # noqa: F401  (they register themselves)
    arc,
    fifo,
    gdsf,
    lfu,
    lru,
    oracle,
    s3fifo,
    saved_time,
    sieve,
)
from kvstore.policies.accounts import pool_in
from kvstore.policies.actions import Admit, Drop
from kvstore.policies.base import EvictionPolicy, create
from kvstore.policies.demoting import Demoting
from kvstore.policies.demotion import DemotionQueue
from kvstore.policies.index import PrefixIndex, Run, Span
from kvstore.policies.uses import newest

# Runs that enter a new policy's order when it has no other to part with.
ENTERED_AT_NEED = 256


class Residency(Demoting):
    """Listens to the index, ranks runs by one policy a tier and pool, and decides what goes.

    `index` is set by `attach`. `on_action` hears every action when it is decided, for logs and
    replays.
    """

    def __init__(self, policy: str = "lru"):
        super().__init__()
        self.policy_name = policy
        self.tick = 0
        self.context.tick = lambda: self.tick
        self._policies: dict[tuple[int, str], EvictionPolicy] = {}
        self._orders: dict[tuple[int, str], tuple[EvictionPolicy, ...]] = {}
        self._pool_orders: dict[str, tuple[EvictionPolicy, ...]] = {}
        self._demotions = DemotionQueue(self)
        self._waiting: dict[Run, EvictionPolicy] = {}
        self._outside: deque[Run] = deque()  # runs that a new policy has not heard of yet
        # An unknown name is refused here, not at the first block; what it learns from starts now.
        self.new_policy(0)

    def attach(self, index: PrefixIndex) -> None:
        """Becomes the listener of an index that is still empty."""
        assert not index.block_count
        self.index = index
        index.listener = self

    def new_policy(self, tier: int) -> EvictionPolicy:
        """An order for one more pool of `tier`."""
        return create(self.policy_name, tier, self.context)

    # What the store does

    def access(self, path: Sequence[Span]) -> Sequence[Span]:
        """A lookup or a put came down `path`: an access to all of it. Answers `path`, still true.

        Where the path ends inside a run, the run is split, so that its end gets no younger.
        """
        span = _last_ready(path)
        if span is None:
            return path
        run, _, stop = span
        if stop < run.ready:
            self.index.split(run, stop)
        self.tick += 1
        run.touched = self.tick
        run.hits += 1
        self._use(run)
        self._demotions.used(run)
        if self.on_event is not None:
            self._record("access", run.root.space.id, run.root.digest, run.first + run.ready)
        for tier in range(self.index.tier_count):
            if run.resident_in(tier):
                for policy in self._rankings(tier, run):
                    policy.on_access(run)
        return path

    def set_cost(self, run: Run, seconds: float) -> None:
        """Losing `run` would cost `seconds`."""
        for tier in range(self.index.tier_count):
            if run.resident_in(tier):
                for policy in self._rankings(tier, run):
                    policy.on_cost(run, seconds)

    def set_policy(self, name: str, at_once: bool = True) -> None:
        """Ranks by another policy from now on; what is resident stays, with its history.

        If not `at_once`, runs enter the new order by `enter_runs`; those that have not are the last
        to go.
        """
        create(name, 0, self.context)  # An unknown name changes nothing.
        self._demotions.forget()
        self.policy_name = name
        self._policies = {key: self.new_policy(key[0]) for key in self._policies}
        self._forget_orders()
        self._record("set_policy", name, at_once)
        self._waiting.clear()
        self._outside = deque(self.index.runs())
        if at_once:
            self._enter_runs(len(self._outside))

    def enter_runs(self, count: int) -> bool:
        """Has so many more runs enter the order after `set_policy`; answers if some are left."""
        self._record("enter_runs", count)
        return self._enter_runs(count)

    def _enter_runs(self, count: int) -> bool:
        while self._outside and count > 0:
            run = self._outside.popleft()
            if run.alive and run.ready:
                self._enter(run, 0, run.ready)
                self.rank_anew(run)
            count -= 1
        return bool(self._outside)

    # Room

    def room(self, tier: int, pool: str, tenant: str) -> int:
        """Bytes that `tenant` may still add in `tier`: below 0 over its cap, huge without one."""
        return self.accounts.room(tier, tenant)

    def make_room(
        self, tier: int, pool: str, tenant: str, bytes_needed: int, incoming_bytes: int = 0
    ) -> Iterator[Drop]:
        """Yields drops until `bytes_needed` are freed in `pool`, or nothing more can go.

        Carry each one out (`PrefixIndex.drop`) before asking for the next. First the tenant's own
        runs, until it is within its cap with `incoming_bytes` more than it has staged and stored;
        then the least worth of any tenant, except what another tenant's floor protects.
        """
        self._record("make_room", tier, pool, tenant, bytes_needed, incoming_bytes)
        accounts = self.accounts
        before = accounts.used(tier, pool)
        over = incoming_bytes - accounts.room(tier, tenant)
        if over > 0:
            yield from self._evict(tier, pool, {tenant: None}, over, "cap", tenant)
            if incoming_bytes > accounts.room(tier, tenant):
                return
        left = bytes_needed - (before - accounts.used(tier, pool))
        if left > 0:
            tenants = accounts.tenants(tier, pool)
            yield from self._evict(tier, pool, tenants, left, "capacity", tenant)

    def _evict(
        self,
        tier: int,
        pool: str,
        tenants: dict[str, None],
        bytes_needed: int,
        reason: str,
        own: str,
    ) -> Iterator[Drop]:
        policy = self._policies.get((tier, pool))
        if policy is None:
            return
        used = self.accounts.used(tier, pool)
        goal = used - bytes_needed
        if used <= goal:
            return
        for run in self._victims(policy, tenants):
            space = run.root.space
            keep = self._keep(policy, run, tier, used - goal)
            if keep is None:
                policy.park(run)
                if run.children is not None:
                    self._waiting[run] = policy
                continue
            if space.tenant != own:
                spare = self.accounts.spare(tier, pool, space.tenant)
                blocks = spare // (space.slot_bytes * space.shard_count)
                if not blocks:
                    del tenants[space.tenant]
                    continue
                keep = max(keep, self.index.keep_for(run, tier, blocks, 0) or 0)
            drop = Drop(run, keep, tier, reason)
            was_cold = self._demotions.is_cold(run)
            if self.on_action is not None:
                self.on_action(drop)
            yield drop
            before, used = used, self.accounts.used(tier, pool)
            assert used < before, "a Drop was not carried out"
            if not tier:
                self._demotions.evicted(run, before - used, was_cold)
            if run.alive:
                self._inherit(run)
            policy.on_evicted(run)
            if used <= goal:
                return

    def _victims(self, policy: EvictionPolicy, tenants: dict[str, None]) -> Iterator[Run]:
        """Those in the order, then those that have to enter it first."""
        yield from policy.victims(tenants)
        while self._outside:
            self._enter_runs(ENTERED_AT_NEED)
            yield from policy.victims(tenants)

    def _keep(self, policy: EvictionPolicy, run: Run, tier: int, bytes_needed: int) -> int | None:
        """How many blocks of a leaf run stay; None when none may go."""
        if not self._may_go(run):
            return None
        space = run.root.space
        blocks = -(-bytes_needed // (space.slot_bytes * space.shard_count))
        anchored = run.anchored_blocks()
        keep = self.index.keep_for(run, tier, blocks, max(anchored, policy.first_to_go(run)))
        if keep is None:
            # What the policy would part with first has left this tier already.
            keep = self.index.keep_for(run, tier, blocks, anchored)
        return keep

    def _may_go(self, run: Run) -> bool:
        """Whether nothing below, in other tiers, is leased or STAGING."""
        return run.children is None or not self.index.anchored_below(run)

    # What the index tells

    def on_slots(self, space: Space, tier: int, delta: int) -> None:
        self.accounts.add(space, tier, delta)

    def on_ready(self, run: Run, start: int, stop: int) -> None:
        self.tick += 1
        run.touched = self.tick
        self._use(run)
        self._demotions.offer(run)
        self._enter(run, start, stop)
        if self.on_action is not None:
            for tier in range(self.index.tier_count):
                if run.resident_in(tier):
                    self.on_action(Admit(run, start, stop, tier))

    def _use(self, run: Run) -> None:
        """`run` is the end of what the request that is served touches or stores."""
        use = self.context.use
        run.policy = newest(run.policy, use)
        if use is not None and run.policy is use:
            use.leaf = run

    def on_adopt(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self.tick += 1
            run.touched = self.tick
        for tier in range(self.index.tier_count):
            there = [run for run in runs if run.resident_in(tier)]
            if not there:
                continue
            for policy in self._rankings(tier, there[0]):
                policy.on_adopt(there)
            if self.on_action is not None:
                for run in there:
                    self.on_action(Admit(run, 0, run.ready, tier))

    def on_split(self, run: Run, tail: Run) -> None:
        if run.policy is not None and run.policy.leaf is run:
            run.policy.leaf = tail
        self._demotions.on_split(run, tail)
        for policy in self._holders(run):
            policy.on_split(run, tail)

    def on_merge(self, run: Run, tail: Run) -> None:
        run.touched = max(run.touched, tail.touched)
        if tail.policy is not None and tail.policy.leaf is tail:
            tail.policy.leaf = run
        run.policy = newest(run.policy, tail.policy)
        self._demotions.on_merge(run, tail)
        for policy in self._holders(run):
            policy.on_merge(run, tail)

    def on_remove(self, run: Run) -> None:
        self._inherit(run)
        if run.policy is not None and run.policy.leaf is run:
            run.policy.leaf = None  # or both would wait for the garbage collector
        self._demotions.on_remove(run)
        for policy in self._holders(run):
            policy.on_remove(run)

    def _inherit(self, run: Run) -> None:
        """What is above `run` becomes a leaf when it goes: it was used whenever `run` was."""
        parent = run.parent
        assert parent is not None
        parent.touched = max(parent.touched, run.touched)
        parent.policy = newest(parent.policy, run.policy)

    def on_leaf(self, run: Run, tier: int) -> None:
        for policy in self._rankings(tier, run):
            policy.on_leaf(run)
        if not tier:
            self._demotions.on_leaf(run)
        if tier and run.is_leaf(0):
            # With a copy below, less is lost when it goes from above.
            for policy in self._rankings(0, run):
                policy.on_leaf(run)

    def on_unanchor(self, run: Run) -> None:
        for policy in self._holders(run):
            policy.unpark(run)
        # What was held by something below, in another tier, is asked again.
        while self._waiting:
            above, policy = self._waiting.popitem()
            policy.unpark(above)

    def _policy(self, tier: int, pool: str) -> EvictionPolicy:
        """The order of a pool, a new one where nothing came yet."""
        key = (tier, pool)
        policy = self._policies.get(key)
        if policy is None:
            policy = self._policies[key] = self.new_policy(tier)
            self._forget_orders()
        return policy

    def _forget_orders(self) -> None:
        """There are other policies than before."""
        self._orders.clear()
        self._pool_orders.clear()

    def _rankings(self, tier: int, run: Run) -> tuple[EvictionPolicy, ...]:
        """The orders that `run` has a place in as part of `tier`."""
        host_pool = run.root.space.pool
        orders = self._orders.get((tier, host_pool))
        if orders is None:
            policy = self._policy(tier, pool_in(tier, host_pool))
            rank = None if tier else self._demotions.rank(run)
            orders = (policy,) if rank is None else (policy, rank)
            self._orders[tier, host_pool] = orders
            self._pool_orders.pop(host_pool, None)
        return orders

    def _holders(self, run: Run) -> tuple[EvictionPolicy, ...]:
        """Policies that may know the run."""
        pool = run.root.space.pool
        found = self._pool_orders.get(pool)
        if found is None:
            tiers = range(self.index.tier_count)
            policies = (self._policies.get((tier, pool_in(tier, pool))) for tier in tiers)
            known = [policy for policy in policies if policy is not None]
            found = self._pool_orders[pool] = (*known, *self._demotions.holders(pool))
        return found

    def _enter(self, run: Run, start: int, stop: int) -> None:
        for tier in range(self.index.tier_count):
            if run.resident_in(tier):
                for policy in self._rankings(tier, run):
                    policy.on_insert(run, start, stop)

    def rank_anew(self, run: Run) -> None:
        for tier in range(self.index.tier_count):
            if run.is_leaf(tier):
                self.on_leaf(run, tier)

    def check_integrity(self) -> None:
        """Recounts every byte from the index; raises AssertionError where it differs."""
        self.accounts.check(self.index)
        self._demotions.check()


def _last_ready(path: Sequence[Span]) -> Span | None:
    """The READY end of a path."""
    for run, start, stop in reversed(path):
        if run.ready > start:
            return Span(run, start, min(stop, run.ready))
    return None
