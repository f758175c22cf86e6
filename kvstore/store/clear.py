"""Clear and epoch bump: everything of a space leaves, durably, a slice at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.core.completion import Completion
from kvstore.core.errors import FailedPrecondition, InvalidRequest, TierError
from kvstore.core.space import Space
from kvstore.policies.index import Run, children_of
from kvstore.store.evict import Remover
from kvstore.store.parts import SLICE_BLOCKS, TIER_NAMES, Parts

TURN_BLOCKS = SLICE_BLOCKS // 4


class ClearFlow:
    """Un-publishes whole spaces. Nothing of them is found from the first moment on."""

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts = parts
        self._remover = remover

    def clear(self, spaces: list[Space]) -> Completion[int]:
        """Drops every block of `spaces`; answers with how many, when all are gone for good."""
        self._check_open(spaces)
        with _written_down():
            self._parts.record.mark_cleared(spaces)
        return self._empty(spaces, "clear")

    def bump(self, space: Space) -> Completion[int]:
        """Begins a new epoch of `space`: older blocks and commits never count again."""
        self._check_open([space])
        with _written_down():
            space.epoch = self._parts.record.bump(space)
        return self._empty([space], "epoch")

    def _check_open(self, spaces: list[Space]) -> None:
        if any(space.closing for space in spaces):
            raise InvalidRequest("the space is being cleared already; wait for that to end")

    def _empty(self, spaces: list[Space], reason: str) -> Completion[int]:
        answer: Completion[int] = Completion()
        left, removed = list(spaces), 0
        for space in spaces:
            space.closing = True

        def go_on() -> None:
            nonlocal removed
            budget = TURN_BLOCKS
            while left and budget > 0:
                count = self._remove_some(left[-1], budget, reason)
                removed += count
                budget -= max(1, count)
                if not count:
                    self._done(left.pop())
            if left:
                self._parts.defer(go_on)
            else:
                answer.resolve(removed)

        go_on()
        return answer

    def _remove_some(self, space: Space, budget: int, reason: str) -> int:
        """Removes up to `budget` blocks from the end of one chain; 0 when the space is empty."""
        root = next(iter(self._parts.index.roots(space)), None)
        if root is None:
            return 0
        run: Run = root.head
        while run.children is not None:
            run = next(iter(children_of(run)))
        keep = max(0, run.count - budget)
        count = run.count - keep
        self._remover.cut(run, keep, reason)
        return count

    def _done(self, space: Space) -> None:
        space.closing = False
        self._parts.events.cleared(space, TIER_NAMES[0])


@contextmanager
def _written_down() -> Iterator[None]:
    """What cannot be made durable is refused before anything changes."""
    try:
        yield
    except TierError as error:
        raise FailedPrecondition(f"nothing was cleared: {error}") from error
