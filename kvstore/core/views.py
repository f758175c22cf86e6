"""What the store shows of itself: status, spaces, tenants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.core.spec import KVSpec


@dataclass(frozen=True, slots=True)
class TierView:
    """A tier now; used + free + resting = capacity.

    `state` is serving, or degraded for the reason that `problem` tells in a sentence. `devices` are
    the parts of it on each GPU, by UUID.
    """

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    resting_bytes: int
    block_count: int
    state: str = "serving"
    problem: str = ""
    prefaulted_bytes: int = 0
    locked_bytes: int = 0
    devices: Mapping[str, TierView] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CostView:
    """A cost model now: of the forward calls of the engine's model `subject`, or of a link.

    `predicted_seconds` are those of 8,192 tokens or of 1 GiB, as `unit` says; the ratios are
    quantiles of measured over predicted seconds.
    """

    subject: str
    device: str
    unit: str
    state: str
    reason: str
    sample_count: int
    predicted_seconds: float
    ratio_p50: float
    ratio_p99: float

    @property
    def label(self) -> str:
        """Subject and device in one; of the daemon's own links there is one each."""
        is_own = self.subject in ("disk>host", "host>disk")
        return self.subject if is_own or not self.device else f"{self.subject} on {self.device}"


@dataclass(frozen=True, slots=True)
class ShadowView:
    """What would be with another policy, or with `tier` so many times as large.

    Ratios and seconds are of the last requests that were followed; seconds are of prefill. Of the
    tokens that are hit, `hbm_token_hit_ratio` are found in copies on GPUs.
    """

    policy: str
    tier: str
    capacity_ratio: float
    token_hit_ratio: float
    saved_ratio: float
    saved_seconds_per_second: float
    hbm_token_hit_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class StatusView:
    """The daemon now. `state` is starting, serving, draining or degraded, for `reason`.

    `policy` acts; where that is not the `configured_policy`, `policy_reason` says why. Of `shadows`
    the first is the configured policy as it is; `what_if` says what they come to.
    """

    state: str
    reason: str
    tiers: dict[str, TierView]
    session_count: int
    lease_count: int
    space_count: int
    reservation_count: int
    pin_count: int
    block_count: int
    leased_bytes: int
    pinned_bytes: int
    reserved_bytes: int
    readopted_blocks: int
    policy: str
    version: str
    pid: int
    uptime_seconds: float
    costs: tuple[CostView, ...] = ()
    configured_policy: str = ""
    policy_reason: str = ""
    shadows: tuple[ShadowView, ...] = ()
    shadow_share: float = 0.0
    shadow_request_count: int = 0
    what_if: str = ""


@dataclass(frozen=True, slots=True)
class SpaceView:
    """A space now; `used_bytes` by tier. A block in several tiers counts once."""

    id: bytes
    spec: KVSpec
    tenant: str
    epoch: int
    block_count: int
    attachment_count: int
    used_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TenantView:
    """A tenant now: bytes used and quotas, by tier; a missing quota is none."""

    tenant: str
    isolated: bool
    used_bytes: dict[str, int] = field(default_factory=dict)
    cap_bytes: dict[str, int] = field(default_factory=dict)
    floor_bytes: dict[str, int] = field(default_factory=dict)
