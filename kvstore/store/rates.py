"""Rates: what was measured of computing and restoring becomes what blocks are worth.

cost book -> is it known, and did it change? -> residency, which policies rank by
"""

from __future__ import annotations

from kvstore.core.space import Space
from kvstore.policies.cost import RecomputeModel
from kvstore.policies.ghost_hbm import HBM
from kvstore.store.costs import SAMPLES_MIN
from kvstore.store.parts import DISK, HOST, Parts
from kvstore.store.promote import PIECE_BYTES

LOOK_SECONDS = 1.0
CHANGE_SHARE = 0.1  # of a rate before the policies hear of it: all their ranks move with it

Pair = tuple[float, float]


class RateKeeper:
    """Tells residency every second which costs are not what it was told."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._due = 0.0
        self._spaces: dict[bytes, Pair] = {}
        self._tiers: dict[int, Pair] = {}

    def tick(self, now: float) -> None:
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        for space, model in self._engines().items():
            cost = model.cost()
            pair = cost.token_seconds, cost.pair_seconds
            if _is_news(self._spaces.get(space.id), pair):
                self._spaces[space.id] = pair
                self._parts.residency.set_rates(space, *pair)
        for tier, byte_seconds in self._links().items():
            pair = 0.0, byte_seconds
            if _is_news(self._tiers.get(tier), pair):
                self._tiers[tier] = pair
                self._parts.residency.set_restore(tier, *pair)

    def _engines(self) -> dict[Space, RecomputeModel]:
        """The model of an engine that computes each space, where it is fitted."""
        found: dict[Space, RecomputeModel] = {}
        for session in self._parts.sessions.values():
            for attachment in session.attachments.values():
                if attachment.space in found:
                    continue
                model = self._parts.costs.engine(attachment.recompute_identity)
                if model is not None and model.state.name == "fitted":
                    found[attachment.space] = model
        return found

    def _links(self) -> dict[int, float]:
        """Seconds a byte takes to come back from a tier: the engine's copy, and the disk's read.

        Restores are long, so that the latency of a disk's piece is shared by all blocks in it.
        Nothing is ranked by what copies on GPUs cost, but shadows count by it.
        """
        costs, found = self._parts.costs, {}
        up = costs.fastest_upward()
        if up is not None:
            found[HOST] = up.cost().byte_seconds
            if self._parts.hbm is not None:
                found[HBM] = min(found[HOST], self._parts.hbm.byte_seconds)
        disk = costs.link(costs.read_link)
        if self._parts.disk is not None and disk is not None and disk.sample_count >= SAMPLES_MIN:
            found[DISK] = disk.cost().seconds(PIECE_BYTES) / PIECE_BYTES + found.get(HOST, 0.0)
        return found


def _is_news(told: Pair | None, now: Pair) -> bool:
    if told is None:
        return True
    return any(abs(a - b) > CHANGE_SHARE * a for a, b in zip(told, now, strict=True))
