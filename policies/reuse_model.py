"""`ReuseModel`: learns from all requests when blocks are asked for again, evicted or not."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque

import numpy as np

from kvstore.policies.reuse_curves import (
    AGE_END,
    AGES,
    FACTOR_CODES,
    GRID,
    OUTPUT_CLASSES,
    REBUILD_REQUESTS,
    REBUILD_SECONDS,
    SHAPES,
    TURN_CLASSES,
    Curves,
    grid_step,
)
from kvstore.policies.reuse_hints import Hints
from kvstore.policies.reuse_units import Units
from kvstore.policies.uses import (
    ALL_BLOCKS,
    NO_HINT,
    UNKNOWN_TOKENS,
    Hint,
    Request,
    Use,
    digest_words,
)

DIRECTORY_BLOCKS_MAX = 1 << 19
REQUESTS_MAX = 1 << 17
HUB_CHILDREN = 8
# Growth of the prompt beyond the last answer, in tokens: what the user, or a tool, has added.
GROWTH_CLASSES = (-512, 0, 64, 512, 4096)


class ReuseModel:
    """A directory of blocks with the unit each was last part of, and the curves of units.

    It forgets units after AGE_END seconds, and the oldest ones past DIRECTORY_BLOCKS_MAX blocks or
    REQUESTS_MAX requests.
    What a request's blocks are worth is in its `Use`: rows of `curves.table`, for known and new.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.curves = Curves()
        self.units = Units(self.curves)
        self.units.add_factor(FACTOR_CODES)
        self.units.add_factor(len(GROWTH_CLASSES) + 2)
        self.hints = Hints(self.curves, self.units)
        self._directory: dict[int, int] = {}
        self._children: dict[int, int] = {}
        self._hubs: set[int] = set()
        self._digests: deque[list[int]] = deque()
        self._first_request = -1  # number of the first use that it remembers
        self._turns: deque[tuple[int, int, int]] = deque()  # turn, input, output
        self._requests = self._rebuild_at = 0
        self._rebuilt = 0.0
        self._mean_output = 128.0

    @property
    def is_told(self) -> bool:
        """Whether it has heard of any request."""
        return self._requests > 0

    @property
    def block_count(self) -> int:
        """Blocks in the directory."""
        return len(self._directory)

    def on_request(self, use: Use, request: Request) -> None:
        if self._first_request < 0:
            self._first_request = use.number
        self.now = max(self.now, request.seconds)
        digests = digest_words(request.digests)
        found = list(map(self._directory.get, digests))
        known = found.index(None) if None in found else len(found)
        use.shared = self._shared(digests, known)
        turn, growth = self._turn(found, known, use.shared, request)
        output = self._output(request.output_tokens)
        self._turns.append((turn, request.input_tokens, output))
        self.units.count(found[:known], self.now)
        new = len(digests) - known
        hint = self.hints.kind(request.hint)
        belief = self.hints.code(request.tenant, hint)
        codes = (min(new.bit_length(), FACTOR_CODES - 1), growth, belief)
        base = hint * SHAPES + _shape(output, turn)
        step, theta = self._multiplier(codes)
        self.units.add(self.now, base, known, theta, codes)
        self.units.add(self.now, base + 1, new, theta, codes)
        # Blocks after the last whole grain go with it.
        use.known = known * request.grain_blocks if new or not known else ALL_BLOCKS
        use.rows = (base * GRID + step, (base + 1) * GRID + step)
        use.weight = self.hints.weight(request.tenant, request.priority)
        self._file(digests, known)
        due = self._requests >= self._rebuild_at and self.now >= self._rebuilt + REBUILD_SECONDS
        if due or not self._requests:
            self._rebuild()
        self._requests += 1

    def on_extend(self, use: Use, digests: bytes) -> None:
        """The request's new blocks are so many more: it came again with them, or stores output."""
        number = use.number - self._first_request
        if not 0 <= number < len(self._turns):
            return
        unit, words = self.units.first + 2 * number + 1, digest_words(digests)
        fresh = [word for word in words if word not in self._directory]
        self._directory.update(dict.fromkeys(fresh, unit))
        self._digests[number].extend(fresh)
        self.units.grow(unit, len(fresh))
        if use.known == ALL_BLOCKS:
            use.known = (len(self._digests[number]) - len(fresh)) * use.grain

    def on_finish(self, use: Use, output_tokens: int, hint: Hint = NO_HINT) -> None:
        """The request's units take the shape that its output, and a hint, give them."""
        number = use.number - self._first_request
        if not 0 <= number < len(self._turns):
            return
        turn, tokens, output = self._turns[number]
        if output_tokens != UNKNOWN_TOKENS:
            output = self._output(output_tokens)
            self._turns[number] = (turn, tokens, output)
        old, step = divmod(use.rows[0], GRID)
        kind, units = old // SHAPES, self.units.first + 2 * number
        if hint.expect_reuse:
            kind = self.hints.kind(hint)
            code = self.hints.code(use.tenant, kind)
            thetas = [self.units.recode(units + n, self.hints.factor, code) for n in (0, 1)]
            step = grid_step(thetas[0], math.log(thetas[0]))
        if hint.priority:
            use.weight = self.hints.weight(use.tenant, hint.priority)
        base = kind * SHAPES + _shape(output, turn)
        for n in (0, 1):
            self.units.reshape(units + n, base + n)
        use.rows = (base * GRID + step, (base + 1) * GRID + step)

    def index(self, row: int, age: float) -> float:
        """Reuse per second of waiting, at best, of a block of the row's kind and so old."""
        return self.curves.rows[row][bisect_right(AGES, age) - 1 if age > 0 else 0]

    def indices(self, rows: np.ndarray, ages: np.ndarray) -> np.ndarray:
        """The same of many."""
        bins = np.searchsorted(AGES_ARRAY, np.maximum(ages, 0.0), side="right") - 1
        found: np.ndarray = self.curves.table[rows, bins]
        return found

    def _shared(self, digests: list[int], known: int) -> int:
        """How many of the first `known` blocks go down to the last hub among them.

        Blocks down to a hub, from which many requests part ways, are a system prompt: to share
        them does not make a conversation.
        """
        if self._hubs.isdisjoint(digests[:known]):
            return 0
        return 1 + max(i for i in range(known) if digests[i] in self._hubs)

    def _turn(
        self, found: list[int | None], known: int, shared: int, request: Request
    ) -> tuple[int, int]:
        """(turn, code of the growth) by the request that the last known block was part of."""
        if known <= shared:
            return request.turn or 1, 0
        unit = found[known - 1]
        assert unit is not None
        turn, tokens, output = self._turns[unit // 2 - self.units.first // 2]
        growth = request.input_tokens - tokens - output
        return request.turn or turn + 1, 1 + bisect_right(GROWTH_CLASSES, growth)

    def _output(self, tokens: int) -> int:
        if tokens == UNKNOWN_TOKENS:
            return int(self._mean_output)
        self._mean_output += 0.01 * (tokens - self._mean_output)
        return tokens

    def _multiplier(self, codes: tuple[int, ...]) -> tuple[int, float]:
        theta = 1.0
        for values, code in zip(self.curves.factors.values, codes, strict=True):
            theta *= values[code]
        return grid_step(theta, math.log(theta)), theta

    def _file(self, digests: list[int], known: int) -> None:
        """The request's blocks are part of its units now."""
        old = self.units.stop - 2
        directory = self._directory
        directory.update(dict.fromkeys(digests[:known], old))
        directory.update(dict.fromkeys(digests[known:], old + 1))
        self._digests.append(digests)
        if 0 < known < len(digests):
            above = digests[known - 1]
            children = self._children[above] = self._children.get(above, 0) + 1
            if children > HUB_CHILDREN:
                self._hubs.add(above)

    def _rebuild(self) -> None:
        self.units.age(self.now)
        self.curves.rebuild(self._requests - self._rebuild_at + REBUILD_REQUESTS)
        self._rebuild_at = self._requests + REBUILD_REQUESTS
        self._rebuilt = self.now
        self._forget()

    def _forget(self) -> None:
        """Drops what is too old, or too much."""
        units, directory = self.units, self._directory
        while self._digests and (
            units.time(units.first) < self.now - AGE_END
            or len(directory) > DIRECTORY_BLOCKS_MAX
            or len(self._turns) > REQUESTS_MAX
        ):
            old = units.first
            for digest in self._digests.popleft():
                if directory.get(digest, -1) // 2 == old // 2:
                    del directory[digest]
                    self._children.pop(digest, None)
                    self._hubs.discard(digest)
            self._turns.popleft()
            units.forget(2)
            self._first_request += 1


def _shape(output: int, turn: int) -> int:
    """Shape, without its hint, of blocks that were known; of new ones it is one more."""
    return (bisect_right(OUTPUT_CLASSES, output) * TURN_CLASSES + min(turn, TURN_CLASSES) - 1) * 2


AGES_ARRAY = np.array(AGES)
