"""Clear and epoch bump: everything of a space leaves, durably, a slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.core.completion import Completion
from kvstore.core.errors import FailedPrecondition, InvalidRequest, TierError
from kvstore.core.space import Space
from kvstore.mover import RECORD_LINK, Job, Moved
from kvstore.policies.index import Run, children_of
from kvstore.store.evict import Remover
from kvstore.store.parts import SLICE_BLOCKS, Parts

TURN_BLOCKS = SLICE_BLOCKS // 4


class ClearFlow:
    """Un-publishes whole spaces. Nothing of them is found from the first moment on."""

    def __init__(
        self, parts: Parts, remover: Remover, when_idle: Callable[[Callable[[], None]], None]
    ) -> None:
        self._parts = parts
        self._remover = remover
        self._when_idle = when_idle

    def clear(self, spaces: list[Space]) -> Completion[int]:
        """Drops every block of `spaces`; answers with how many, when all are gone for good.

        `when_idle` runs its argument once nothing is on its way to disk: what gets there later than
        the mark is written would seem to have come after the clear.
        """
        record = self._parts.record
        self._check_open(spaces)
        if not record.durable_slow:
            with _written_down():
                record.mark_cleared(spaces)
            return self._empty(spaces, "clear")
        answer = self._close(spaces)
        self._when_idle(
            lambda: self._write(
                lambda: record.mark_cleared(spaces), spaces, answer,
                lambda _: self._empty(spaces, "clear", answer),
            )
        )  # fmt: skip
        return answer

    def bump(self, space: Space) -> Completion[int]:
        """Begins a new epoch of `space`: older blocks and commits never count again."""
        record = self._parts.record
        self._check_open([space])
        if not record.durable_slow:
            with _written_down():
                space.epoch = record.bump(space)
            return self._empty([space], "epoch")
        answer = self._close([space])

        def written(epoch: int) -> None:
            space.epoch = epoch
            self._empty([space], "epoch", answer)

        self._write(lambda: record.bump(space), [space], answer, written)
        return answer

    def _close(self, spaces: list[Space]) -> Completion[int]:
        """Nothing of `spaces` is found or taken in from now on."""
        for space in spaces:
            space.close()
        return Completion()

    def _write(
        self, work: Callable[[], Any], spaces: list[Space], answer: Completion[int],
        then: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        """Has a worker write it down; if that fails everything is as it was."""

        def done(moved: Moved) -> None:
            if moved.error is None:
                then(moved.value)
                return
            for space in spaces:
                space.closing = False
            answer.fail(FailedPrecondition(f"nothing was cleared: {moved.error}"))

        if not self._parts.mover.submit(Job(RECORD_LINK, "", 0, 0, work, done)):
            done(Moved(None, TierError("the daemon is stopping"), 0.0))

    def _check_open(self, spaces: list[Space]) -> None:
        if any(space.closing for space in spaces):
            raise InvalidRequest("the space is being cleared already; wait for that to end")

    def _empty(
        self, spaces: list[Space], reason: str, answer: Completion[int] | None = None
    ) -> Completion[int]:
        answer = Completion() if answer is None else answer
        left, removed = list(spaces), 0
        for space in spaces:
            space.close()

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
        for name in self._parts.tier_names:
            self._parts.events.cleared(space, name)


@contextmanager
def _written_down() -> Iterator[None]:
    """What cannot be made durable is refused before anything changes."""
    try:
        yield
    except TierError as error:
        raise FailedPrecondition(f"nothing was cleared: {error}") from error
