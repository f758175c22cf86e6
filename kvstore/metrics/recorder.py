"""`Metrics`, the recorder that counts.

Counts are plain Python numbers that the owner thread adds to and the scraping thread only reads;
prometheus_client writes them out.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

import kvstore
from kvstore.core.recorder import Recorder
from kvstore.metrics.table import (
    COSTS_KNOWN,
    COUNTER,
    HISTOGRAM,
    RESULTS,
    TABLE,
    TIERS,
    TIMED_METHODS,
    Row,
)

Labels = tuple[str, ...]


class Number:
    """A counter's or gauge's value."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, count: float = 1) -> None:
        self.value += count


class Histogram:
    """Counts of observations per bucket, the last for what is beyond every bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def quantile(self, q: float) -> float:
        """Upper bound of the bucket that holds the quantile; 0 without observations."""
        rank, seen = q * sum(self.counts), 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            if seen and seen >= rank:
                return bound
        return 0.0


class Family:
    """All children of one metric, by their label values."""

    __slots__ = ("children", "row")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.children: dict[Labels, Number | Histogram] = {}
        for values in product(*row.labels.values()):
            self._child(values)

    def _child(self, values: Labels) -> Number | Histogram:
        found = self.children.get(values)
        if found is None:
            assert len(values) == len(self.row.labels), f"{self.row.name} has other labels"
            found = Histogram(self.row.buckets) if self.row.kind == HISTOGRAM else Number()
            # A new dict, so that a scrape under way keeps the one it iterates over.
            self.children = {**self.children, values: found}
        return found

    def number(self, *values: str) -> Number:
        child = self._child(values)
        assert isinstance(child, Number)
        return child

    def histogram(self, *values: str) -> Histogram:
        child = self._child(values)
        assert isinstance(child, Histogram)
        return child

    def collect(self) -> Metric:
        row, labels = self.row, list(self.row.labels)
        if row.kind == HISTOGRAM:
            family = HistogramMetricFamily(row.name, row.help, labels=labels)
            for values, child in self.children.items():
                assert isinstance(child, Histogram)
                bounds = [*map(str, child.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(child.counts), strict=True))
                family.add_metric(values, buckets, child.total)
            return family
        make = CounterMetricFamily if row.kind == COUNTER else GaugeMetricFamily
        plain = make(row.name, row.help, labels=labels)
        for values, child in self.children.items():
            assert isinstance(child, Number)
            plain.add_metric(values, child.value)
        return plain


class Metrics(Recorder):
    """The counting recorder, with a registry of its own."""

    def __init__(self) -> None:
        self.families = {row.name: Family(row) for row in TABLE}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.number("kvstore_build_info", kvstore.__version__, platform.python_version()).add()
        self._results = {r: self.number("kvstore_lookups_total", r) for r in RESULTS}
        self._lookup_tokens = self.number("kvstore_lookup_tokens_total")
        self._hit_tokens = {t: self.number("kvstore_hit_tokens_total", t) for t in TIERS}
        self._seconds = {m: self.histogram(name) for m, name in TIMED_METHODS.items()}
        self._restored_bytes = {t: self.number("kvstore_restored_bytes_total", t) for t in TIERS}
        self._plans: dict[tuple[str, bool], Number] = {}
        self._rpcs: dict[tuple[str, str], Number] = {}

    def number(self, name: str, *labels: str) -> Number:
        """The counter or gauge `name` with these label values, for a part to keep."""
        return self.families[name].number(*labels)

    def value(self, name: str, *labels: str) -> float:
        """What the counter or gauge `name` stands at."""
        return self.number(name, *labels).value

    def histogram(self, name: str, *labels: str) -> Histogram:
        return self.families[name].histogram(*labels)

    def totals(self) -> dict[str, float]:
        """Each counter and gauge, summed over its labels."""
        return {
            name: sum(n.value for n in family.children.values() if isinstance(n, Number))
            for name, family in self.families.items()
            if family.row.kind != HISTOGRAM
        }

    def collect(self) -> Iterator[Metric]:
        for family in self.families.values():
            yield family.collect()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def rpc(self, method: str, status: str, seconds: float | None = None) -> None:
        number = self._rpcs.get((method, status))
        if number is None:
            number = self.number("kvstore_rpcs_total", method, status)
            self._rpcs[method, status] = number
        number.value += 1
        if seconds is not None:
            histogram = self._seconds.get(method)
            if histogram is not None:
                histogram.observe(seconds)

    def lookup(self, result: str, tokens: int, hit_tokens: int, tier: str = "host") -> None:
        self._results[result].value += 1
        self._lookup_tokens.value += tokens
        if hit_tokens:
            self.hit(tier, hit_tokens)

    def hit(self, tier: str, tokens: int) -> None:
        number = self._hit_tokens.get(tier) or self.number("kvstore_hit_tokens_total", tier)
        number.value += tokens

    def restored(self, tier: str, byte_count: int) -> None:
        self._restored_bytes[tier].value += byte_count

    def put_blocks(self, outcome: str, count: int) -> None:
        self.number("kvstore_put_blocks_total", outcome).add(count)

    def put_bytes(self, count: int) -> None:
        self.number("kvstore_put_bytes_total").add(count)

    def copied(self, link: str, byte_count: int, seconds: float) -> None:
        self.number("kvstore_copied_bytes_total", link).add(byte_count)
        self.histogram("kvstore_copy_seconds", link).observe(seconds)

    def queue_rejected(self, link: str, blocks: int = 1) -> None:
        self.number("kvstore_queue_rejected_blocks_total", link).add(blocks)

    def evicted(self, tier: str, reason: str, blocks: int, byte_count: int) -> None:
        self.number("kvstore_evicted_blocks_total", tier, reason).add(blocks)
        self.number("kvstore_evicted_bytes_total", tier, reason).add(byte_count)

    def demoted(self, blocks: int, byte_count: int) -> None:
        self.number("kvstore_demoted_blocks_total").add(blocks)
        self.number("kvstore_demoted_bytes_total").add(byte_count)

    def demotion_skipped(self, reason: str, blocks: int) -> None:
        self.number("kvstore_demotions_skipped_blocks_total", reason).add(blocks)

    def promoted(self, blocks: int, byte_count: int) -> None:
        self.number("kvstore_promoted_blocks_total").add(blocks)
        self.number("kvstore_promoted_bytes_total").add(byte_count)

    def hbm_promoted(self, blocks: int, byte_count: int) -> None:
        self.number("kvstore_hbm_promoted_blocks_total").add(blocks)
        self.number("kvstore_hbm_promoted_bytes_total").add(byte_count)

    def hbm_loaded(self, blocks: int) -> None:
        self.number("kvstore_hbm_loaded_blocks_total").add(blocks)

    def restore_failed(self, reason: str, blocks: int) -> None:
        self.number("kvstore_restore_failed_blocks_total", reason).add(blocks)

    def planned(self, kind: str, measured: bool) -> None:
        number = self._plans.get((kind, measured))
        if number is None:
            costs = COSTS_KNOWN[measured]
            number = self.number("kvstore_plan_decisions_total", kind, costs)
            self._plans[kind, measured] = number
        number.value += 1

    def plan_ended(self, kind: str, predicted: float, measured: float, regret: float) -> None:
        self.number("kvstore_plan_predicted_seconds_total", kind).add(predicted)
        self.number("kvstore_plan_measured_seconds_total", kind).add(measured)
        self.number("kvstore_plan_regret_seconds_total", kind).add(regret)

    def deadline_missed(self, predicted: bool) -> None:
        self.number("kvstore_plan_deadline_misses_total", ("no", "yes")[predicted]).add()

    def set_cost(
        self, subject: str, fitted: bool, sample_count: int, ratio_p50: float, ratio_p99: float
    ) -> None:
        self._set("kvstore_cost_fitted", int(fitted), subject)
        self._set("kvstore_cost_samples", sample_count, subject)
        self._set("kvstore_cost_error_ratio", ratio_p50, subject, "p50")
        self._set("kvstore_cost_error_ratio", ratio_p99, subject, "p99")

    def set_hint(self, tenant: str, hint: str, belief: float) -> None:
        self._set("kvstore_hint_belief_ratio", belief, tenant, hint)

    def corrupt(self, tier: str, blocks: int = 1) -> None:
        self.number("kvstore_corrupt_blocks_total", tier).add(blocks)

    def readopted(self, tier: str, blocks: int) -> None:
        self.number("kvstore_readopted_blocks_total", tier).add(blocks)

    def locked(self, blocks: int) -> None:
        self.number("kvstore_locked_blocks_total").add(blocks)

    def limit_rejected(self, limit: str) -> None:
        self.number("kvstore_limit_rejections_total", limit).add()

    def reservation_expired(self, count: int = 1) -> None:
        self.number("kvstore_reservations_expired_total").add(count)

    def lease_ended(self, reason: str, count: int = 1) -> None:
        self.number("kvstore_leases_ended_total", reason).add(count)

    def events_dropped(self, count: int) -> None:
        self.number("kvstore_events_dropped_total").add(count)

    def shadow_request(self, outcome: str) -> None:
        self.number("kvstore_shadow_requests_total", outcome).add()

    def shadow_tokens(self, tokens: float) -> None:
        self.number("kvstore_shadow_tokens_total").add(tokens)

    def shadow_served(
        self, policy: str, tier: str, capacity: str, hit_tokens: float, seconds: float
    ) -> None:
        labels = policy, tier, capacity
        self.number("kvstore_shadow_hit_tokens_total", *labels).add(hit_tokens)
        self.number("kvstore_shadow_saved_seconds_total", *labels).add(seconds)

    def set_shadow(
        self, policy: str, tier: str, capacity: str, hit_ratio: float, per_second: float
    ) -> None:
        labels = policy, tier, capacity
        self.number("kvstore_shadow_hit_tokens_total", *labels)
        self.number("kvstore_shadow_saved_seconds_total", *labels)
        self._set("kvstore_shadow_token_hit_ratio", hit_ratio, *labels)
        self._set("kvstore_shadow_saved_seconds_per_second", per_second, *labels)

    def set_shadow_share(self, share: float) -> None:
        self._set("kvstore_shadow_share_ratio", share)

    def shadow_restarted(self, reason: str) -> None:
        self.number("kvstore_shadow_restarts_total", reason).add()

    def policy_switched(self, reason: str) -> None:
        self.number("kvstore_policy_switches_total", reason).add()

    def set_policy_guarded(self, guarded: bool) -> None:
        self._set("kvstore_policy_guarded", int(guarded))

    def loop_stall(self, seconds: float) -> None:
        self.histogram("kvstore_loop_stall_seconds").observe(seconds)

    def set_sessions(self, session_count: int, space_count: int) -> None:
        self._set("kvstore_sessions", session_count)
        self._set("kvstore_spaces", space_count)

    def set_leases(
        self, lease_count: int, leased_bytes: int, pinned_bytes: int, reserved_bytes: int
    ) -> None:
        self._set("kvstore_leases", lease_count)
        self._set("kvstore_leased_bytes", leased_bytes)
        self._set("kvstore_pinned_bytes", pinned_bytes)
        self._set("kvstore_reserved_bytes", reserved_bytes)

    def set_index(self, block_count: int, run_count: int) -> None:
        self._set("kvstore_index_blocks", block_count)
        self._set("kvstore_index_runs", run_count)

    def set_tier(
        self, tier: str, capacity: int, used: int, free: int, resting: int, block_count: int
    ) -> None:
        self._set("kvstore_tier_capacity_bytes", capacity, tier)
        self._set("kvstore_tier_used_bytes", used, tier)
        self._set("kvstore_tier_free_bytes", free, tier)
        self._set("kvstore_tier_resting_bytes", resting, tier)
        self._set("kvstore_tier_blocks", block_count, tier)

    def set_tier_degraded(self, tier: str, degraded: bool) -> None:
        self._set("kvstore_tier_degraded", int(degraded), tier)

    def set_queue(self, link: str, byte_count: int) -> None:
        self._set("kvstore_queue_bytes", byte_count, link)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self.number(name, *labels).value = value
