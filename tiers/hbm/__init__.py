"""Blocks in the memory of a GPU."""

from kvstore.tiers.hbm.tier import HbmTier

__all__ = ["HbmTier"]
