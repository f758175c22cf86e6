"""Shadowing: has shadows follow a sample of the requests in the owner's spare time, and guards.

every request -> is its conversation followed? -> a bounded queue -> slices of ticks: ghosts
-> estimates, for status and metrics -> the guard -> which policy acts

A request costs its lookup a microsecond or two. What the slices cannot keep up with makes the
sample smaller, never the queue longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvstore.core.space import Space
from kvstore.core.views import ShadowView
from kvstore.policies.guard import Guard, Switch
from kvstore.policies.reuse_model import ReuseModel
from kvstore.policies.sampling import SAMPLE_MIN, GhostSpace, fitting_share, is_followed
from kvstore.policies.shadow import Job, Served, Setup, Shadows, Variant
from kvstore.policies.shadow_words import what_if
from kvstore.policies.uses import Request, Use
from kvstore.store.operators import switch_policy
from kvstore.store.parts import Parts

QUEUE_REQUESTS, QUEUE_BYTES = 256, 4 << 20
# A tick's part of the owner thread; a step is a fraction of a millisecond.
WORK_SECONDS, STEPS_MAX = 0.002, 256
# After so long a share that was lowered is raised, if that leaves half of the time to spare.
LOOK_SECONDS, SPARE_SHARE = 600.0, 0.25
TICK_SECONDS = 0.05
USES_KEPT = 4096
REQUESTS_TOLD = 100  # before anything is said in words
_OVER = object()


class Shadowing:
    """The shadows of one store, what feeds them, and the guard that acts on what they show."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        policy = parts.config.policy
        self.guard = Guard(policy.eviction)
        self._setup = _setup(parts)
        self._worth_version = -1
        self._spaces: dict[bytes, GhostSpace] = {}
        self._queue: deque[Job] = deque()
        self._queue_bytes = 0
        self._running: Iterator[None] | None = None
        self._restart = ""  # why, once it is due
        self._share_max = self._share = 1.0
        self._looked, self._spent_seconds = parts.clock.now(), 0.0
        self._own_model: ReuseModel | None = None
        self._own_uses: dict[int, Use] = {}
        self.shadows: Shadows | None = None
        if policy.shadows:
            self._begin()
            parts.requests.listeners.append(self._heard)
            parts.requests.finished.append(self._finished)

    @property
    def share(self) -> float:
        """Share of the conversations that is followed; 0 without shadows."""
        return 0.0 if self.shadows is None else self.shadows.share

    # ---- What comes ----

    def _heard(self, space: Space, request: Request, use: Use) -> None:
        """A new request; this is all that a lookup pays for."""
        shadows = self.shadows
        assert shadows is not None
        shadows.pass_by(request.seconds, shadows.prefill_seconds(space, request.input_tokens))
        if self._own_model is not None:
            use = self._learn(self._own_model, request, use)
        if not is_followed(request, use, shadows.share):
            return
        ghost = self._spaces.get(space.id) or self._take_in(space)
        if self._restart:
            self._parts.recorder.shadow_request("skipped")
        elif len(self._queue) >= QUEUE_REQUESTS or self._queue_bytes > QUEUE_BYTES:
            self._share, self._restart = max(self._share / 2, SAMPLE_MIN), "overflow"
        else:
            self._queue.append(Job(ghost, request, use))
            self._queue_bytes += len(request.digests)

    def _learn(self, model: ReuseModel, request: Request, use: Use) -> Use:
        """The use as `saved_time` would know it where the live policy learns nothing."""
        own = self._own_uses[use.number] = Use(use.number, request)
        if len(self._own_uses) > USES_KEPT:
            del self._own_uses[next(iter(self._own_uses))]
        model.on_request(own, request)
        return own

    def _finished(self, use: Use, output_tokens: int) -> None:
        assert self.shadows is not None
        own = self._own_uses.pop(use.number, None)
        if own is not None and self._own_model is not None:
            self._own_model.on_finish(own, output_tokens)
        self.shadows.finish(own or use, output_tokens)

    def _take_in(self, space: Space) -> GhostSpace:
        """A space that is new to the ghosts: its blocks may be smaller than all before."""
        found = self._spaces[space.id] = GhostSpace(space)
        smallest = min(ghost.slot_bytes for ghost in self._spaces.values())
        self._share_max = fitting_share(self._setup.host_bytes, self._setup.all_bytes, smallest)
        if self._share > self._share_max:
            self._share = self._share_max
            self._restart = self._restart or "space"
        return found

    # ---- What operators do ----

    def policy_set(self, policy: str) -> None:
        """Another policy is configured from now on, and acts."""
        self._parts.recorder.policy_switched("operator")
        self._parts.recorder.set_policy_guarded(False)
        self.guard = Guard(policy)
        if self.shadows is not None and policy != self._setup.policy:
            self._restart = "policy"

    def resized(self, byte_count: int) -> None:
        """The shared host pool has another size: shadows of once and twice it begin anew."""
        setup = _setup(self._parts)
        self._setup = setup._replace(host_bytes={**setup.host_bytes, "": byte_count})
        if self.shadows is not None:
            self._restart = self._restart or "capacity"

    def disk_resized(self, capacity_bytes: int) -> None:
        """The disk has room for so much: shadows begin anew."""
        daily = self._parts.config.tiers.disk.endurance_dwpd * capacity_bytes
        self._setup = self._setup._replace(disk_bytes=capacity_bytes, daily_bytes=daily)
        if self.shadows is not None:
            self._restart = self._restart or "capacity"

    def cleared(self) -> None:
        """Blocks were un-published that shadows may still have."""
        if self.shadows is not None:
            self._restart = self._restart or "clear"

    # ---- Work ----

    def tick(self) -> None:
        """Does a bounded part of what is queued."""
        if self.shadows is None or (self._running is None and not self._queue and self._is_idle()):
            return
        clock = self._parts.clock
        start = clock.now()
        for _ in range(STEPS_MAX):
            if not self._step() or clock.now() - start >= WORK_SECONDS:
                break
        self._spent_seconds += clock.now() - start

    def _is_idle(self) -> bool:
        """Nothing is due but the queue; looks now and then whether the share may grow."""
        if self._restart:
            return False
        now = self._parts.clock.now()
        if now - self._looked >= LOOK_SECONDS:
            allowed = SPARE_SHARE * WORK_SECONDS / TICK_SECONDS * (now - self._looked)
            if self._share < self._share_max and self._spent_seconds < allowed:
                self._share, self._restart = min(2 * self._share, self._share_max), "idle"
            self._looked, self._spent_seconds = now, 0.0
        return not self._restart

    def _step(self) -> bool:
        """One step; False when there is none."""
        if self._running is None:
            self._running = self._next()
            if self._running is None:
                return False
        if next(self._running, _OVER) is _OVER:
            self._running = None
        return True

    def _next(self) -> Iterator[None] | None:
        if self._restart:
            return self._begin_anew()
        if not self._queue:
            return None
        job = self._queue.popleft()
        self._queue_bytes -= len(job.request.digests)
        # A ghost's block is what one digest is of.
        return self._follow(job._replace(request=job.request._replace(grain_blocks=1)))

    def _follow(self, job: Job) -> Iterator[None]:
        shadows, parts = self.shadows, self._parts
        assert shadows is not None
        worth, quotas = parts.residency.context.worth, parts.residency.accounts.quotas
        if worth.version != self._worth_version:
            self._worth_version = worth.version
            shadows.worth.follow(worth)
        shadows.take_quotas(quotas)
        served = yield from shadows.serve(job)
        self._count(shadows, job, served)
        if shadows.is_full:
            self._judge(shadows)

    def _count(self, shadows: Shadows, job: Job, served: Served) -> None:
        """Each request that is followed stands for 1 / share requests."""
        recorder, scale = self._parts.recorder, 1.0 / shadows.share
        recorder.shadow_request("followed")
        recorder.shadow_tokens(job.request.input_tokens * scale)
        for variant, tokens, seconds, _ in zip(shadows.variants, *served, strict=True):
            recorder.shadow_served(*_labels(variant), tokens * scale, seconds * scale)

    def _judge(self, shadows: Shadows) -> None:
        first, second = map(shadows.saved_by_policy, shadows.complete)
        switch = self.guard.judge(first, second)
        if switch is not None:
            self._act(switch)
            shadows.restart_window(self._parts.clock.now())

    def _act(self, switch: Switch) -> None:
        recorder, guarded = self._parts.recorder, switch.policy != self.guard.configured
        switch_policy(self._parts, switch.policy)
        recorder.policy_switched("guard" if guarded else "recovery")
        recorder.set_policy_guarded(guarded)

    # ---- Beginnings ----

    def _begin(self) -> None:
        parts, setup = self._parts, self._setup
        models = parts.residency.context.models
        if ReuseModel in models:
            self._own_model, self._own_uses = None, {}
        elif self._own_model is None:
            self._own_model = ReuseModel()
        model = models.get(ReuseModel) or self._own_model
        assert model is not None
        self.shadows = Shadows(setup, self._share, [model], parts.clock.now())
        self._worth_version = -1
        parts.recorder.set_shadow_share(self._share)
        for variant in setup.variants:
            parts.recorder.set_shadow(*_labels(variant), 0.0, 0.0)

    def _begin_anew(self) -> Iterator[None]:
        """Empties the ghosts and starts with new ones; what comes meanwhile is not followed."""
        old, reason = self.shadows, self._restart
        assert old is not None
        self._queue.clear()
        self._queue_bytes = 0
        yield from old.empty()
        for variant in self._setup.variants:
            self._parts.recorder.set_shadow(*_labels(variant), 0.0, 0.0)
        self._setup = self._setup._replace(policy=self.guard.configured)
        self._restart = ""
        self._begin()
        self._parts.recorder.shadow_restarted(reason)

    # ---- What shows ----

    @property
    def window_requests(self) -> int:
        """Requests that the estimates are of."""
        return 0 if self.shadows is None else self.shadows.window_requests

    def what_if(self) -> str:
        """What the estimates come to, in a sentence; empty until there are some."""
        if self.shadows is None or self.shadows.window_requests < REQUESTS_TOLD:
            return ""
        return what_if(self.shadows.estimates())

    def views(self) -> tuple[ShadowView, ...]:
        """What every variant would do, the live one first."""
        if self.shadows is None:
            return ()
        return tuple(
            ShadowView(
                policy=estimate.variant.policy,
                tier=estimate.variant.tier,
                capacity_ratio=estimate.variant.capacity,
                token_hit_ratio=estimate.token_hit_ratio,
                saved_ratio=estimate.saved_ratio,
                saved_seconds_per_second=estimate.saved_per_second,
                hbm_token_hit_ratio=estimate.hbm_token_hit_ratio,
            )
            for estimate in self.shadows.estimates()
        )


def _labels(variant: Variant) -> tuple[str, str, str]:
    return variant.policy, variant.tier, f"{variant.capacity:g}"


def _setup(parts: Parts) -> Setup:
    config = parts.config
    disk = None if parts.disk is None else parts.disk.usage().capacity_bytes
    priced, prices = config.tiers.disk.admission == "measured", config.prices
    return Setup(
        policy=config.policy.eviction,
        host_bytes={pool: parts.host_bytes(pool) for pool in config.host_pools},
        disk_bytes=disk,
        daily_bytes=config.tiers.disk.endurance_dwpd * (disk or 0),
        policies=config.policy.shadows,
        capacities=config.policy.shadow_capacities,
        prices=(prices.gpu_second, prices.written_byte) if priced else None,
        copies=None if parts.hbm is None else parts.hbm.copies(),
    )
