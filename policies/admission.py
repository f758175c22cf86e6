"""Admission: which of the blocks that are due for the disk are worth a write there.

A block is written if its copy is expected to save more GPU time than its write costs:

    P(asked for again while it is on disk) x (v - r) x GPU price > bytes x (wear + shadow price)

v is what computing it takes and r what bringing it back from disk does; P comes from the reuse
curves of the block's kind, from its age on, for as long as the disk keeps what is written now. The
shadow price is what the writes that are left are worth to the others that compete for them, as a
multiplier of a limit is in any linear program.

Blocks count with their chain: below a block that is not on disk nothing can be, so of each chain
the leading part with the greatest sum is written. Of kinds and ages that nothing is known of yet,
blocks are written that were asked for twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.policies.base import Context
from kvstore.policies.index import Run, Span
from kvstore.policies.reuse_curves import AGE_END
from kvstore.policies.reuse_model import ReuseModel
from kvstore.policies.uses import Use, newest

DISK = 1
# What was written is averaged over so long, and over no less time than this.
RATE_SECONDS, RATE_SECONDS_MIN = 600.0, 60.0
OFFERS_KEPT, OFFERS_MIN = 256, 16
DAY_SECONDS, SPEND_SECONDS = 86_400.0, 900.0


def spare_rate(left_bytes: float, daily_bytes: float) -> float:
    """Bytes a second that may be written so that a bucket of a day's writes lasts; 0 is any.

    What is left may be spent within SPEND_SECONDS, what is gained at once.
    """
    if not daily_bytes:
        return 0.0
    return max(left_bytes, 0.0) / SPEND_SECONDS + daily_bytes / DAY_SECONDS


class WriteRate:
    """Bytes a second, recent ones counting more: each by exp(-age / RATE_SECONDS)."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since: float | None = None
        self._time = 0.0

    def add(self, byte_count: float, now: float) -> None:
        """So much is written now."""
        if self._since is None:
            self._since = self._time = now
        self._sum = self._sum * self._kept(now) + byte_count
        self._time = max(self._time, now)

    def at(self, now: float) -> float:
        """The rate; 0 before anything was written."""
        if self._since is None:
            return 0.0
        seconds = max(now - self._since, RATE_SECONDS_MIN)
        window = RATE_SECONDS * (1.0 - math.exp(-seconds / RATE_SECONDS))
        return self._sum * self._kept(now) / window

    def _kept(self, now: float) -> float:
        return math.exp(-max(now - self._time, 0.0) / RATE_SECONDS)


class ShadowPrice:
    """What a byte written is worth to those that compete: of the last offers worth their wear.

    With a scarcity of s, as many of them are below the price as are the share s of their bytes.
    """

    def __init__(self) -> None:
        self._offers: deque[tuple[float, int]] = deque(maxlen=OFFERS_KEPT)

    def offer(self, value: float, byte_count: int) -> None:
        """So many bytes would be worth `value` each."""
        self._offers.append((value, byte_count))

    def at(self, scarcity: float) -> float:
        """The price while `scarcity` (0 to 1) of what is offered cannot be written."""
        if scarcity <= 0 or len(self._offers) < OFFERS_MIN:
            return 0.0
        left = scarcity * sum(byte_count for _, byte_count in self._offers)
        for value, byte_count in sorted(self._offers):
            left -= byte_count
            if left <= 0:
                return value
        return math.inf


class Piece(NamedTuple):
    """Blocks [start, stop) of a run that are written or not as one, and what that nets."""

    run: Run
    start: int
    stop: int
    net: float


class Evidence(NamedTuple):
    """What speaks for a block: its newest use, its chance of a reuse, whether it had one yet."""

    use: Use | None
    chance: float = 0.0
    again: bool = False
    known: bool = False


class Admission:
    """Judges chains by prices: of a GPU's second and of a byte written, in one currency.

    It learns from every request what comes back, whatever policy evicts.
    """

    def __init__(self, context: Context) -> None:
        self._worth = context.worth
        self._model = context.model(ReuseModel)
        self._gpu_second = self._written_byte = 0.0
        self._disk_bytes = 0
        self._written, self._offered = WriteRate(), WriteRate()
        self._offers = ShadowPrice()
        self._shadow = 0.0
        self._seconds_kept = AGE_END

    def set_prices(self, gpu_second: float, written_byte: float, disk_bytes: int) -> None:
        """What a second of a GPU and a byte written cost, and how much the disk holds."""
        self._gpu_second, self._written_byte = gpu_second, written_byte
        self._disk_bytes = disk_bytes

    def begin(self, busy: float, spare: float) -> None:
        """A round of offers: what share of them finds the link busy, and how many bytes a second
        may be written in the long run; 0 is any.
        """
        now = self._model.now
        offered = self._offered.at(now)
        scarce = 1.0 - spare / offered if spare and offered else 0.0
        self._shadow = self._offers.at(max(busy, scarce))
        rate = self._written.at(now)
        self._seconds_kept = min(AGE_END, self._disk_bytes / rate) if rate else AGE_END

    def wrote(self, byte_count: int) -> None:
        """So much of what was offered is written now."""
        self._written.add(byte_count, self._model.now)

    def worthy(self, leaf: Run, due: Sequence[Span]) -> list[Span]:
        """The leading part of `due`, unwritten blocks down to the end of `leaf`, to write."""
        pieces = self._pieces(leaf, due)
        best = total = 0.0
        count = 0
        for number, piece in enumerate(pieces, 1):
            total += piece.net
            if total > best:
                best, count = total, number
        return _joined(pieces[:count])

    def _pieces(self, leaf: Run, due: Sequence[Span]) -> list[Piece]:
        """What is due, cut where the newest request's new blocks begin; parents first."""
        pieces: list[Piece] = []
        evidence = Evidence(leaf.policy)
        for run, start, stop in reversed(due):
            use = newest(evidence.use, run.policy)
            evidence = evidence._replace(use=use)
            old = 0 if use is None else min(max(use.known - run.first, start), stop)
            for first, past in ((max(old, start), stop), (start, old)):
                if first < past:
                    evidence = self._evidence(run, past - 1, evidence)
                    pieces.append(Piece(run, first, past, self._net(run, first, past, evidence)))
        pieces.reverse()
        return pieces

    def _evidence(self, run: Run, block: int, below: Evidence) -> Evidence:
        """What speaks for a block of `run`: all that does for what is below it, and more.

        A run that prompts part ways from is used with each of its children, and the one at hand
        is the coldest of them.
        """
        position, use = run.first + block, below.use
        branches = _branches(run)
        again = below.again or branches > 1
        if use is None:
            return below._replace(again=again or run.hits > 0)
        age = self._model.now - use.seconds
        chance = self._model.curves.chance(use.row(position), age, self._seconds_kept)
        chance = max(chance, below.chance)
        if branches > 1:
            chance = 1.0 - (1.0 - chance) ** branches
        known = self._model.curves.is_known(age)
        return Evidence(use, chance, again or position < use.known, known)

    def _net(self, run: Run, start: int, stop: int, evidence: Evidence) -> float:
        """What writing the blocks is worth less what it costs."""
        space, use = run.root.space, evidence.use
        gain = self._worth.gain(space, run.first + start, run.first + stop, DISK)
        # An engine of several shards computes on as many GPUs.
        value = gain * self._gpu_second * space.shard_count
        byte_count = (stop - start) * space.slot_bytes * space.shard_count
        if not evidence.known:
            return value if evidence.again else -byte_count * self._written_byte
        value *= evidence.chance * (1.0 if use is None else use.weight)
        net = value - byte_count * self._written_byte
        if net > 0:
            self._offers.offer(net / byte_count, byte_count)
            self._offered.add(byte_count, self._model.now)
        return net - byte_count * self._shadow


def _branches(run: Run) -> int:
    """How many ways prompts go on below a run."""
    children = run.children
    if children is None:
        return 0
    return 1 if isinstance(children, Run) else len(children)


def _joined(pieces: Iterable[Piece]) -> list[Span]:
    """Pieces as spans, those of one run in one."""
    spans: list[Span] = []
    for run, start, stop, _ in pieces:
        if spans and spans[-1].run is run and spans[-1].stop == start:
            start = spans.pop().start
        spans.append(Span(run, start, stop))
    return spans
