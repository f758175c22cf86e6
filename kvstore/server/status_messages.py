"""Views of the store as messages: status, spaces, tenants."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.core.views import SpaceView, StatusView, TenantView, TierView
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.translate import spec_message

_PLAIN_FIELDS = (
    "state", "reason", "session_count", "lease_count", "space_count", "policy", "version", "pid",
    "uptime_seconds", "block_count", "readopted_blocks", "leased_bytes", "reservation_count",
    "pin_count", "configured_policy", "policy_reason", "shadow_share", "shadow_request_count",
    "what_if",
)  # fmt: skip
_COST_FIELDS = (
    "subject", "device", "unit", "state", "reason", "sample_count", "predicted_seconds",
    "ratio_p50", "ratio_p99",
)  # fmt: skip
_SHADOW_FIELDS = (
    "policy", "tier", "capacity_ratio", "token_hit_ratio", "saved_ratio",
    "saved_seconds_per_second", "hbm_token_hit_ratio",
)  # fmt: skip
_TIER_FIELDS = (
    "capacity_bytes", "used_bytes", "block_count", "state", "free_bytes", "resting_bytes",
    "prefaulted_bytes", "locked_bytes", "problem",
)  # fmt: skip


def status_response(view: StatusView, counters: Mapping[str, float]) -> pb.StatusResponse:
    return pb.StatusResponse(
        **{name: getattr(view, name) for name in _PLAIN_FIELDS},
        tiers={name: _tier_message(tier) for name, tier in view.tiers.items()},
        counters=counters,
        costs=[
            pb.CostStatus(**{field: getattr(cost, field) for field in _COST_FIELDS})
            for cost in view.costs
        ],
        shadows=[
            pb.ShadowStatus(**{field: getattr(shadow, field) for field in _SHADOW_FIELDS})
            for shadow in view.shadows
        ],
    )


def _tier_message(view: TierView) -> pb.TierStatus:
    return pb.TierStatus(
        **{field: getattr(view, field) for field in _TIER_FIELDS},
        devices={name: _tier_message(device) for name, device in view.devices.items()},
    )


def space_message(view: SpaceView) -> pb.SpaceStatus:
    return pb.SpaceStatus(
        space_id=view.id,
        spec=spec_message(view.spec),
        tenant=view.tenant,
        epoch=view.epoch,
        block_count=view.block_count,
        used_bytes=view.used_bytes,
        attachment_count=view.attachment_count,
    )


def tenant_message(view: TenantView) -> pb.TenantStatus:
    return pb.TenantStatus(
        tenant=view.tenant,
        isolated=view.isolated,
        used_bytes=view.used_bytes,
        cap_bytes=view.cap_bytes,
        floor_bytes=view.floor_bytes,
    )
