"""Two ways to read from a disk: both right, and the one that is quicker is taken."""

from __future__ import annotations

import numpy as np
import pytest
from disk_world import aligned, payload, put

from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.quickest import COPIED, STRAIGHT, TRY_EVERY, Quickest

LENGTH = 300_000
SLOT = 303_104


@pytest.mark.parametrize("way", [STRAIGHT, COPIED])
def test_either_way_reads_the_same(disk_directory, monkeypatch, way):
    """I11: bytes and checksums do not depend on how blocks are read, nor on how they lie."""
    monkeypatch.setattr(Quickest, "choose", lambda quickest: way)
    tier = DiskTier(disk_directory, 64 << 20)
    places = put(tier, list(range(24)), LENGTH)
    wanted = [*range(9, 24), *range(0, 9, 2), 3]
    targets = [aligned(SLOT) for _ in wanted]
    sums = tier.read_many([(places[i], t) for i, t in zip(wanted, targets, strict=True)], LENGTH)
    for i, target, checksum in zip(wanted, targets, sums, strict=True):
        assert np.array_equal(target[:LENGTH], payload(i, LENGTH))
        assert checksum == tier.checksum(places[i])
    tier.close(keep=False)


def test_the_quicker_way_is_taken_and_the_other_looked_at():
    """A way that becomes slower is left for the other one, and taken again when that is slower."""
    quickest = Quickest()

    def shares(seconds):
        taken = [0, 0]
        for _ in range(20 * TRY_EVERY):
            way = quickest.choose()
            taken[way] += 1
            quickest.took(way, 1 << 20, seconds[way])
        return [count / sum(taken) for count in taken]

    assert shares([1e-3, 2e-3])[STRAIGHT] > 0.9
    assert shares([4e-3, 2e-3])[COPIED] > 0.7
    assert shares([1e-3, 2e-3])[STRAIGHT] > 0.5
