"""What a block is worth where it lies: the seconds that are lost when it leaves."""

from __future__ import annotations

from kvstore.core.space import Space

# Seconds a token and a (token, earlier token) pair of the prompt cost to recompute, until they are
# measured: an 8-billion-parameter model on one large accelerator.
TOKEN_SECONDS, PAIR_SECONDS = 32e-6, 1.3e-9


class Worth:
    """Marginal seconds of blocks: v = b s + c s (p + s/2) for s tokens after p others.

    Over the blocks of a prompt this sums to the prefill time less its constant, so each block has
    a value of its own, which grows with depth. A copy that stays below takes its part of it away.
    """

    def __init__(self) -> None:
        self.is_plain = True  # No tier's restores cost anything.
        self.version = 0  # grows whenever something costs more, or less, than before
        self._default = (TOKEN_SECONDS, PAIR_SECONDS)
        self._lines: dict[bytes, tuple[float, float]] = {}
        self._rates: dict[bytes, tuple[float, float]] = {}
        self._restores: dict[int, tuple[float, float]] = {}

    def set_rates(self, space: Space | None, token_seconds: float, pair_seconds: float) -> None:
        """Recomputing costs so much in `space`; None sets what holds where nothing is measured."""
        self.version += 1
        if space is None:
            self._default = (token_seconds, pair_seconds)
            self._lines.clear()
        else:
            self._rates[space.id] = (token_seconds, pair_seconds)
            self._lines.pop(space.id, None)

    def rates(self, space: Space | None) -> tuple[float, float]:
        """(token seconds, pair seconds) of a space, or where nothing is measured."""
        return self._default if space is None else self._rates.get(space.id, self._default)

    def set_restore(self, tier: int, latency_seconds: float, byte_seconds: float) -> None:
        """Getting a block back from `tier` takes so long; without, it takes no time."""
        self.version += 1
        self.is_plain = False
        self._restores[tier] = (latency_seconds, byte_seconds)

    def follow(self, other: Worth) -> None:
        """Everything costs what it does for `other`; spaces go by their ids."""
        self.version += 1
        self.is_plain, self._default = other.is_plain, other._default
        self._rates, self._restores = dict(other._rates), dict(other._restores)
        self._lines.clear()

    def line(self, space: Space) -> tuple[float, float]:
        """(seconds of the first block, seconds more for each block that lies deeper)."""
        line = self._lines.get(space.id)
        if line is None:
            token, pair = self.rates(space)
            size = space.block_size
            line = (token * size + pair * size * size / 2, pair * size * size)
            self._lines[space.id] = line
        return line

    def seconds(self, space: Space, position: int) -> float:
        """What recomputing the block at `position` costs."""
        first, slope = self.line(space)
        return first + slope * position

    def gain(self, space: Space, start: int, stop: int, tier: int) -> float:
        """What restoring the blocks at [start, stop) from `tier` takes less than computing them."""
        first, slope = self.line(space)
        each = first + slope * (start + stop - 1) / 2 - self.restore_seconds(space, tier)
        return (stop - start) * each

    def loss(self, space: Space, position: int, tier: int, below: int | None) -> float:
        """Seconds lost when a block leaves `tier` and is then found in tier `below`, or nowhere."""
        recompute = self.seconds(space, position)
        here = min(recompute, self.restore_seconds(space, tier))
        if below is None:
            return recompute - here
        return max(0.0, min(recompute, self.restore_seconds(space, below)) - here)

    def restore_seconds(self, space: Space, tier: int) -> float:
        """Getting one block back from `tier`."""
        latency, rate = self._restores.get(tier, (0.0, 0.0))
        return latency + rate * space.slot_bytes * space.shard_count
