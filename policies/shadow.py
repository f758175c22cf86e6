"""Shadows: ghosts of other policies and capacities that follow a sample of a live store's requests.

What each of them hits, and the seconds that this saves, say what the live store would do under
another policy, or with more or less room. Like is compared with like: the first shadow has the
live policy and the live capacities. Copies on GPUs change nothing below them: other sizes of that
tier are tried on the first shadow's ghost, without one of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore.core.keys import Chain, Segment
from kvstore.core.space import Space
from kvstore.policies.accounts import Quota
from kvstore.policies.base import Model
from kvstore.policies.ghost import Ghost, Hit
from kvstore.policies.ghost_disk import DISK, HOST
from kvstore.policies.ghost_hbm import HBM, Copies, HbmTier
from kvstore.policies.sampling import DIGEST_BYTES, GhostSpace, SharedBlocks
from kvstore.policies.uses import UNKNOWN_TOKENS, Hint, Request, Use
from kvstore.policies.worth import Worth

ROOT = bytes(32)  # digests stand for their root, too
TIER_NAMES = ("host", "disk", "hbm")
# Requests in each half of the window; two halves have to agree before anything is concluded.
HALF_REQUESTS = 500
# Requests whose end is still heard of.
USES_KEPT = 4096


class Variant(NamedTuple):
    """What a shadow has other than the live store: its policy, or a tier so many times as large."""

    policy: str
    tier: str = "host"
    capacity: float = 1.0


class Setup(NamedTuple):
    """The live store: its policy and tiers; and what is tried beside it.

    `prices`, of a second and of a byte written, are there if only what is worth it is written,
    `copies` if there is a tier hbm.
    """

    policy: str
    host_bytes: Mapping[str, int]
    disk_bytes: int | None = None
    daily_bytes: float = 0.0
    policies: Sequence[str] = ()
    capacities: Sequence[float] = ()
    prices: tuple[float, float] | None = None
    copies: Copies | None = None

    @property
    def variants(self) -> list[Variant]:
        """The live store's own first; those that the first ghost can tell of last."""
        rivals = [name for name in dict.fromkeys(self.policies) if name != self.policy]
        sizes = [factor for factor in dict.fromkeys(self.capacities) if factor != 1]
        there = (True, self.disk_bytes is not None, self.copies is not None)
        tiers = [name for name, is_there in zip(TIER_NAMES, there, strict=True) if is_there]
        return [
            Variant(self.policy),
            *[Variant(name) for name in rivals],
            *[Variant(self.policy, tier, factor) for tier in tiers for factor in sizes],
        ]

    @property
    def ghosts(self) -> list[Variant]:
        """Variants that take a ghost of their own."""
        return [variant for variant in self.variants if variant.tier != "hbm"]

    @property
    def all_bytes(self) -> float:
        """What the tiers of all ghosts have together."""
        host, disk = sum(self.host_bytes.values()), self.disk_bytes or 0
        return sum(
            host * (v.capacity if v.tier == "host" else 1)
            + disk * (v.capacity if v.tier == "disk" else 1)
            for v in self.ghosts
        )

    def copies_of(self, variant: Variant, share: float) -> list[Copies]:
        """Tiers hbm that are tried on a variant's ghost: the live size, and on the first others."""
        if self.copies is None:
            return []
        sizes = [1.0]
        if variant == Variant(self.policy):
            sizes += [other.capacity for other in self.variants if other.tier == "hbm"]
        return [self.copies.times(share * size) for size in sizes]


class Job(NamedTuple):
    """A request to follow: its live use, and what ghosts are told of it."""

    space: GhostSpace
    request: Request
    use: Use

    @property
    def shared(self) -> bytes:
        """Digests of the beginning that it has in common with many."""
        return self.request.digests[: DIGEST_BYTES * self.use.shared]


class Shadow:
    """One variant's ghost, and its own uses of the requests that are followed."""

    def __init__(
        self, variant: Variant, setup: Setup, share: float, worth: Worth, models: Iterable[Model]
    ) -> None:
        self.variant = variant
        factors = [variant.capacity if variant.tier == name else 1.0 for name in TIER_NAMES[:2]]
        self._host_bytes = {
            pool: share * factors[HOST] * size for pool, size in setup.host_bytes.items()
        }
        disk = setup.disk_bytes
        self._disk_bytes = None if disk is None else share * factors[DISK] * disk
        self._copies, self._share = setup.copies_of(variant, share), share
        self.ghost = Ghost(
            variant.policy,
            {pool: int(size) for pool, size in self._host_bytes.items()},
            None if self._disk_bytes is None else int(self._disk_bytes),
            share * factors[DISK] * setup.daily_bytes,
            models,
            [HbmTier(copies) for copies in self._copies],
        )
        residency = self.ghost.residency
        residency.context.worth = worth
        if setup.prices is not None and self._disk_bytes is not None:
            residency.set_prices(*setup.prices, int(self._disk_bytes))
        self._uses: dict[int, Use] = {}

    def allow(self, pool: str, shared_bytes: float, all_shared_bytes: float) -> None:
        """Has room for so many bytes of common beginnings besides its part of the capacities.

        `all_shared_bytes` are those of all pools. Of them a tier hbm holds no more than the live
        one does.
        """
        self.ghost.host_bytes[pool] = int(self._host_bytes[pool] + shared_bytes)
        if self._disk_bytes is not None:
            self.ghost.disk_bytes = int(self._disk_bytes + shared_bytes)
        for tier, (room, _, _) in zip(self.ghost.hbm, self._copies, strict=True):
            tier.allow(min(room + all_shared_bytes, room / self._share))

    def serve(self, job: Job) -> Hit:
        """Looks a request up and stores it; loads and `make_room` come next."""
        residency, digests = self.ghost.residency, job.request.digests
        use = residency.request(job.request)
        use.follow(job.use)
        self._uses[job.use.number] = use
        if len(self._uses) > USES_KEPT:
            del self._uses[next(iter(self._uses))]
        return self.ghost.store(job.space, ROOT, Chain((Segment(digests, DIGEST_BYTES),)))

    def finish(self, live: Use, output_tokens: int) -> None:
        """A request that may have been followed has ended."""
        use = self._uses.pop(live.number, None)
        if use is not None:
            use.follow(live)
            self.ghost.residency.finish(use, output_tokens, Hint())


class Half:
    """Half a window: what was asked for, and by variant what was hit and saved.

    `traffic_seconds` are those of the prefills of all requests, followed or not.
    """

    def __init__(self, began: float, variant_count: int) -> None:
        self.began = self.ended = began
        self.traffic_seconds = 0.0
        self.tokens = 0
        self.prefill_seconds = 0.0
        self.hit_tokens = [0] * variant_count
        self.hbm_tokens = [0] * variant_count
        self.saved = [0.0] * variant_count
        self.rows: list[list[float]] = []  # saved seconds of each request

    def add(self, request: Request, prefill: float, served: Served) -> None:
        self.tokens += request.input_tokens
        self.prefill_seconds += prefill
        for n, (tokens, seconds, near) in enumerate(zip(*served, strict=True)):
            self.hit_tokens[n] += tokens
            self.hbm_tokens[n] += near
            self.saved[n] += seconds
        self.rows.append(served.saved_seconds)


class Estimate(NamedTuple):
    """What a variant would do for all requests, by what its ghost does for some of them.

    Ratios are of the window; `saved_seconds` a second are seconds of prefill. Tokens that are hit
    are also those with copies on GPUs.
    """

    variant: Variant
    token_hit_ratio: float = 0.0
    saved_ratio: float = 0.0
    saved_per_second: float = 0.0
    hbm_token_hit_ratio: float = 0.0


class Served(NamedTuple):
    """What a request came to: tokens hit, seconds saved, tokens with copies, by variant."""

    hit_tokens: list[int]
    saved_seconds: list[float]
    hbm_tokens: list[int]


class Shadows:
    """All shadows, at one share of the conversations.

    `models` are those of the live store, which tells them. `now` is when it begins.
    """

    def __init__(
        self, setup: Setup, share: float, models: Iterable[Model] = (), now: float = 0.0
    ) -> None:
        self.setup = setup
        self.share = share
        self.worth = Worth()
        models = tuple(models)
        self.variants = setup.variants
        self.shadows = [Shadow(v, setup, share, self.worth, models) for v in setup.ghosts]
        self._shared = SharedBlocks()
        self._quotas: dict[tuple[int, str], Quota] = {}
        self.requests = 0
        self.restart_window(now)

    def restart_window(self, now: float) -> None:
        """Forgets what was hit, not what is kept."""
        self.complete: deque[Half] = deque(maxlen=2)
        self.current = Half(now, len(self.variants))

    @property
    def is_full(self) -> bool:
        """Whether a window has just been completed."""
        return len(self.complete) == 2 and not self.current.rows

    @property
    def window_requests(self) -> int:
        """Requests that the estimates are of."""
        return sum(len(half.rows) for half in self._recent)

    @property
    def _recent(self) -> list[Half]:
        return [*list(self.complete)[-1:], self.current]

    def pass_by(self, seconds: float, prefill_seconds: float) -> None:
        """A request came, whether it is followed or not: its prefill without a store."""
        self.current.ended = seconds
        self.current.traffic_seconds += prefill_seconds

    def prefill_seconds(self, space: Space, tokens: int) -> float:
        """Computing all of a prompt, its constant left out."""
        token, pair = self.worth.rates(space)
        return tokens * (token + pair * tokens / 2)

    def serve(self, job: Job) -> Generator[None, None, Served]:
        """Has all shadows serve a request; a step is short, the request counts after the last."""
        space, seconds = job.space, job.request.seconds
        self._shared.saw(space, job.shared)
        left = 1.0 - self.share
        extra, all_extra = left * self._shared.byte_count(space.pool), left * self._shared.all_bytes
        hits: list[Hit] = []
        for shadow in self.shadows:
            shadow.allow(space.pool, extra, all_extra)
            hit, near = shadow.serve(job), []
            yield
            for blocks in shadow.ghost.load(space, seconds):
                near.append(blocks)
                yield
            hits.append(hit._replace(with_copies=tuple(near)))
            yield from shadow.ghost.make_room(space, seconds)
        hits += [hits[0]._replace(with_copies=(near,)) for near in hits[0].with_copies[1:]]
        served = Served(
            [hit.blocks * space.block_size for hit in hits],
            [self._saved(space, hit) for hit in hits],
            [hit.hbm_blocks * space.block_size for hit in hits],
        )
        self._count(job, served)
        return served

    def _saved(self, space: Space, hit: Hit) -> float:
        """Seconds that a hit saves: what is on disk only lies deepest, as it is evicted first.

        What has copies lies first: of blocks that are loaded together the deepest lose theirs.
        """
        near, host = hit.hbm_blocks, hit.blocks - hit.disk_blocks
        parts = ((0, near, HBM), (near, host, HOST), (host, hit.blocks, DISK))
        return sum(max(0.0, self.worth.gain(space, *part)) for part in parts)

    def _count(self, job: Job, served: Served) -> None:
        request = job.request
        self.requests += 1
        prefill = self.prefill_seconds(job.space, request.input_tokens)
        self.current.add(request, prefill, served)
        if len(self.current.rows) >= HALF_REQUESTS:
            self.complete.append(self.current)
            self.current = Half(self.current.ended, len(self.variants))

    def take_quotas(self, quotas: Mapping[tuple[int, str], Quota]) -> None:
        """Tenants have these quotas in the live store, and their part of them here."""
        for key in [*self._quotas, *quotas]:
            tier, tenant = key
            cap, floor = quotas.get(key, Quota())
            cap = None if cap is None else int(self.share * cap)
            floor = None if floor is None else int(self.share * floor)
            for shadow in self.shadows:
                if tier < shadow.ghost.index.tier_count:
                    shadow.ghost.residency.set_quota(tenant, tier, cap, floor)
        self._quotas = dict(quotas)

    def empty(self) -> Iterator[None]:
        """Lets go of all blocks; a step is short. Freed at once, unlike what is only dropped."""
        for shadow in self.shadows:
            yield from shadow.ghost.empty()

    def finish(self, use: Use, output_tokens: int = UNKNOWN_TOKENS) -> None:
        """A request has ended; `use` is the live one."""
        for shadow in self.shadows:
            shadow.finish(use, output_tokens)

    def saved_by_policy(self, half: Half) -> dict[str, list[float]]:
        """Seconds saved at each request of a half, by policy, at the live capacities."""
        return {
            variant.policy: [row[n] for row in half.rows]
            for n, variant in enumerate(self.variants)
            if variant.capacity == 1
        }

    def estimates(self) -> list[Estimate]:
        """What each variant would do, by the window."""
        halves = self._recent
        tokens = max(1, sum(half.tokens for half in halves))
        prefill = sum(half.prefill_seconds for half in halves) or 1.0
        time = halves[-1].ended - halves[0].began
        traffic = sum(half.traffic_seconds for half in halves) / time if time > 0 else 0.0
        found = []
        for n, variant in enumerate(self.variants):
            ratio = sum(half.saved[n] for half in halves) / prefill
            found.append(
                Estimate(
                    variant,
                    sum(half.hit_tokens[n] for half in halves) / tokens,
                    ratio,
                    ratio * traffic,
                    sum(half.hbm_tokens[n] for half in halves) / tokens,
                )
            )
        return found
