"""Host tier: pools of memory that clients on the same machine map read-only."""

from kvstore.tiers.host.opening import PoolConfig
from kvstore.tiers.host.tier import HostTier

__all__ = ["HostTier", "PoolConfig"]
