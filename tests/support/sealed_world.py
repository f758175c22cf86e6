"""Encrypted disk tiers: keys, and directories filled with blocks that follow from their number."""

from __future__ import annotations

from pathlib import Path

from disk_world import SIZE, is_right, put, recovered

from kvstore.core.key_file import DiskKey
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.vault import Vault

CAPACITY = 8 << 20
COUNT = 40
OLD, NEW, OTHER = (DiskKey(name, bytes([n + 1]) * 32) for n, name in enumerate(("old", "new", "x")))


def opened(path: Path, *keys: DiskKey, **options) -> DiskTier:
    return DiskTier(path, CAPACITY, vault=Vault(keys) if keys else None, **options)


def filled(path: Path, *keys: DiskKey, numbers=range(COUNT), length: int = SIZE) -> dict:
    tier = opened(path, *keys)
    recovered(tier)
    places = put(tier, list(numbers), length)
    tier.check_integrity()
    tier.close()
    return places


def right(tier: DiskTier, places: dict, length: int = SIZE) -> list[int]:
    """Numbers of the blocks that are readable; asserts that none is readable and wrong."""
    return [i for i, place in places.items() if is_right(tier, place, i, length)]
