"""Blocks on a local disk: preallocated segment files, and an index that is the log of truth."""

from kvstore.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
