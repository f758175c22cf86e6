"""The table of all metrics; meanings for operators: docs/metrics.md."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import kvstore
from kvstore.core.recorder import (
    DEMOTION_SKIPS,
    POLICY_SWITCHES,
    RESTORE_FAILURES,
    SHADOW_RESTARTS,
)

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

HANDLER_BUCKETS = (
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.2, 1.0,
)  # fmt: skip
STALL_BUCKETS = (0.5e-3, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 7e-3, 10e-3, 20e-3, 50e-3, 0.2, 1.0)
COPY_BUCKETS = (50e-6, 200e-6, 1e-3, 5e-3, 20e-3, 0.1, 0.5, 2.0, 10.0)

TIERS = ("host", "disk", "hbm")
LINKS = (
    "staging>host", "host>check", "host>disk", "disk>host", "disk>check", "record", "host>arena",
    "arena>staging", "peer>staging",
)  # fmt: skip
RESULTS = ("hit", "partial", "miss")
OUTCOMES = ("stored", "present", "pending", "rejected")
EVICTION_REASONS = ("capacity", "quota", "clear", "epoch", "corrupt", "lost_parent")
LEASE_ENDS = ("release", "finish", "expiry", "death", "replaced", "lost")
PLANS = ("load_all", "recompute_all", "prefix", "split")
COSTS_KNOWN = ("unmeasured", "measured")
COST_SUBJECTS = ("disk>host", "host>disk")
TIMED_METHODS = {"Lookup": "kvstore_lookup_seconds", "Commit": "kvstore_commit_seconds"}
METHODS = (
    "OpenSession", "Attach", "Lookup", "Restore", "CancelRestore", "Release", "Renew",
    "FinishRequest", "Reserve", "Commit", "Abort", "ReportStep", "ReportTransfer", "Session",
    "PutInline", "FetchInline", "Subscribe", "Status", "SetPolicy", "SetQuota", "Pin", "Unpin",
    "Clear", "BumpEpoch", "Explain", "Flush", "Drain", "Verify", "TraceStart", "TraceStop",
    "AttachDevice", "LoadDevice",
)  # fmt: skip
LIMITS = (
    "sessions", "leases_per_session", "spaces", "leased_bytes_per_session",
    "leased_bytes_per_tenant", "pinned_bytes_per_session", "pinned_bytes_per_tenant",
    "reserved_bytes_per_session", "reserved_bytes_per_tenant", "staging_bytes",
    "queue_bytes_per_link", "inflight_message_bytes", "message_bytes", "max_blocks",
    "subscriptions", "subscriptions_per_session",
)  # fmt: skip


class Row(NamedTuple):
    """One metric: its name as scraped, and the label values that are there from the start."""

    name: str
    kind: str
    help: str
    labels: Mapping[str, Sequence[str]] = MappingProxyType({})
    buckets: Sequence[float] = ()


TIER = {"tier": TIERS}
LINK = {"link": LINKS}
# The live store's own shadow by default; the others are there once the store is.
SHADOW = {"policy": ("saved_time",), "tier": ("host",), "capacity": ("1",)}
TABLE = (
    Row("kvstore_sessions", GAUGE, "Sessions open."),
    Row("kvstore_spaces", GAUGE, "Spaces known: a KVSpec of a tenant each."),
    Row("kvstore_leases", GAUGE, "Leases held."),
    Row("kvstore_leased_bytes", GAUGE, "Bytes of blocks that leases hold in place."),
    Row("kvstore_pinned_bytes", GAUGE, "Bytes of blocks that pins keep."),
    Row("kvstore_reserved_bytes", GAUGE, "Bytes of slots reserved by puts under way."),
    Row(
        "kvstore_lookups_total", COUNTER,
        "Lookups by how much they found of their full blocks.", {"result": RESULTS},
    ),
    Row("kvstore_lookup_tokens_total", COUNTER, "Tokens looked up."),
    Row(
        "kvstore_hit_tokens_total", COUNTER,
        "Tokens found, counted up to the first block that was not (prefix-closed).", TIER,
    ),
    Row(
        "kvstore_lookup_seconds", HISTOGRAM, "Time a Lookup took on the owner thread.",
        buckets=HANDLER_BUCKETS,
    ),
    Row(
        "kvstore_commit_seconds", HISTOGRAM,
        "Time a Commit took on the owner thread, its copy left out.", buckets=HANDLER_BUCKETS,
    ),
    Row(
        "kvstore_loop_stall_seconds", HISTOGRAM,
        "Time the owner thread was late for its own timer.", buckets=STALL_BUCKETS,
    ),
    Row("kvstore_put_blocks_total", COUNTER, "Blocks of puts.", {"outcome": OUTCOMES}),
    Row("kvstore_put_bytes_total", COUNTER, "Payload bytes that became READY."),
    Row(
        "kvstore_restored_bytes_total", COUNTER,
        "Payload bytes handed to clients to restore from.", TIER,
    ),
    Row("kvstore_tier_capacity_bytes", GAUGE, "Size of a tier.", TIER),
    Row("kvstore_tier_used_bytes", GAUGE, "Bytes of slots reserved or published.", TIER),
    Row("kvstore_tier_free_bytes", GAUGE, "Bytes that can be reserved at once.", TIER),
    Row(
        "kvstore_tier_resting_bytes", GAUGE,
        "Bytes un-published that wait for leases before they are free.", TIER,
    ),
    Row("kvstore_tier_blocks", GAUGE, "READY blocks (shards counted each).", TIER),
    Row(
        "kvstore_evicted_blocks_total", COUNTER, "Blocks that left a tier.",
        {**TIER, "reason": EVICTION_REASONS},
    ),
    Row(
        "kvstore_evicted_bytes_total", COUNTER, "Payload bytes that left a tier.",
        {**TIER, "reason": EVICTION_REASONS},
    ),
    Row(
        "kvstore_tier_degraded", GAUGE, "1 while a tier has a problem and takes no blocks.", TIER,
    ),
    Row("kvstore_demoted_blocks_total", COUNTER, "Blocks written to disk, durably."),
    Row("kvstore_demoted_bytes_total", COUNTER, "Payload bytes written to disk, durably."),
    Row(
        "kvstore_demotions_skipped_blocks_total", COUNTER,
        "Blocks that were due for the disk and not written.", {"reason": DEMOTION_SKIPS},
    ),
    Row("kvstore_promoted_blocks_total", COUNTER, "Blocks brought from disk to the host tier."),
    Row(
        "kvstore_promoted_bytes_total", COUNTER,
        "Payload bytes brought from disk to the host tier.",
    ),
    Row("kvstore_hbm_promoted_blocks_total", COUNTER, "Blocks copied from host to tier hbm."),
    Row(
        "kvstore_hbm_promoted_bytes_total", COUNTER, "Payload bytes copied from host to tier hbm."
    ),
    Row("kvstore_hbm_loaded_blocks_total", COUNTER, "Blocks that engines were given in tier hbm."),
    Row(
        "kvstore_restore_failed_blocks_total", COUNTER,
        "Blocks of a Restore that could not be had.", {"reason": RESTORE_FAILURES},
    ),
    Row(
        "kvstore_plan_decisions_total", COUNTER, "Lookups answered with a plan.",
        {"kind": PLANS, "costs": COSTS_KNOWN},
    ),
    Row(
        "kvstore_plan_predicted_seconds_total", COUNTER,
        "Predicted time to first token of plans that were carried out.", {"kind": PLANS},
    ),
    Row(
        "kvstore_plan_measured_seconds_total", COUNTER,
        "The same with loads as they were measured.", {"kind": PLANS},
    ),
    Row(
        "kvstore_plan_regret_seconds_total", COUNTER,
        "Seconds that the best other plan would have spared.", {"kind": PLANS},
    ),
    Row(
        "kvstore_plan_deadline_misses_total", COUNTER,
        "Deadlines that no plan could meet, and those missed against the prediction.",
        {"predicted": ("yes", "no")},
    ),
    Row(
        "kvstore_cost_fitted", GAUGE, "1 once a cost model is fitted to measurements.",
        {"subject": COST_SUBJECTS},
    ),
    Row(
        "kvstore_cost_samples", GAUGE, "Measurements that a cost model learned from.",
        {"subject": COST_SUBJECTS},
    ),
    Row(
        "kvstore_cost_error_ratio", GAUGE, "Measured over predicted seconds of a cost model.",
        {"subject": COST_SUBJECTS, "quantile": ("p50", "p99")},
    ),
    Row(
        "kvstore_shadow_requests_total", COUNTER,
        "Sampled requests that the shadows followed, or not while they start anew.",
        {"outcome": ("followed", "skipped")},
    ),
    Row(
        "kvstore_shadow_tokens_total", COUNTER,
        "Tokens of prompts that the shadows stand for: followed ones over their share.",
    ),
    Row(
        "kvstore_shadow_hit_tokens_total", COUNTER,
        "Tokens of these that would be found, under another policy or capacity.", SHADOW,
    ),
    Row(
        "kvstore_shadow_saved_seconds_total", COUNTER,
        "Seconds of prefill that this would save.", SHADOW,
    ),
    Row(
        "kvstore_shadow_token_hit_ratio", GAUGE,
        "Tokens found out of all tokens looked up, over the last requests followed.", SHADOW,
    ),
    Row(
        "kvstore_shadow_saved_seconds_per_second", GAUGE,
        "Seconds of prefill saved a second, over the last requests followed.", SHADOW,
    ),
    Row("kvstore_shadow_share_ratio", GAUGE, "Share of the conversations that shadows follow."),
    Row(
        "kvstore_shadow_restarts_total", COUNTER, "Times that the shadows started anew.",
        {"reason": SHADOW_RESTARTS},
    ),
    Row(
        "kvstore_policy_guarded", GAUGE,
        "1 while another policy acts than the one configured, because its shadow saves more.",
    ),
    Row(
        "kvstore_policy_switches_total", COUNTER, "Times that another policy began to act.",
        {"reason": POLICY_SWITCHES},
    ),
    Row(
        "kvstore_hint_belief_ratio", GAUGE,
        "Reuse of a tenant's hinted prompts over that of all with such a hint; 0 until given.",
        {"tenant": ("default",), "hint": ("none", "likely", "certain")},
    ),
    Row(
        "kvstore_corrupt_blocks_total", COUNTER,
        "Blocks that did not match their checksum; each was a miss.", TIER,
    ),
    Row(
        "kvstore_locked_blocks_total", COUNTER,
        "Encrypted blocks dropped at the start because no key of the file opens them.",
    ),
    Row(
        "kvstore_readopted_blocks_total", COUNTER,
        "Blocks of an earlier daemon taken over at the start.", TIER,
    ),
    Row("kvstore_queue_bytes", GAUGE, "Bytes queued or running over a link.", LINK),
    Row(
        "kvstore_queue_rejected_blocks_total", COUNTER,
        "Blocks skipped because the link's queue was full.", LINK,
    ),
    Row("kvstore_copied_bytes_total", COUNTER, "Bytes copied over a link.", LINK),
    Row(
        "kvstore_copy_seconds", HISTOGRAM, "Time of one copy, queueing left out.", LINK,
        COPY_BUCKETS,
    ),
    Row(
        "kvstore_rpcs_total", COUNTER, "Calls answered, over any transport, by gRPC status.",
        {"method": METHODS, "status": ("OK",)},
    ),
    Row(
        "kvstore_limit_rejections_total", COUNTER,
        "Requests cut short or refused by a configured limit.", {"limit": LIMITS},
    ),
    Row(
        "kvstore_reservations_expired_total", COUNTER,
        "Reservations given up by time to live or by their client's death.",
    ),
    Row("kvstore_leases_ended_total", COUNTER, "Leases ended.", {"reason": LEASE_ENDS}),
    Row(
        "kvstore_events_dropped_total", COUNTER,
        "KV events that left the buffer before a subscriber read them.",
    ),
    Row(
        "kvstore_clock_jumps_total", COUNTER,
        "Jumps of the wall clock of half a second or more, forward or back.",
    ),
    Row("kvstore_index_blocks", GAUGE, "Blocks in the prefix index."),
    Row("kvstore_index_runs", GAUGE, "Runs in the prefix index."),
    Row(
        "kvstore_build_info", GAUGE, "Always 1; the labels say what runs.",
        {"version": (kvstore.__version__,), "python": (platform.python_version(),)},
    ),
)  # fmt: skip
