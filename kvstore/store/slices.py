"""Walks and scans in slices: long work is done a part a turn, and others have theirs between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.core.completion import Completion
from kvstore.policies.index import PrefixIndex, Run, Walk, children_of
from kvstore.store.parts import SLICE_BLOCKS, Parts


class SlicedWalk:
    """Steps a walk to its end, then answers with what `finish` returns, raises or completes.

    An object and no closure: one that defers itself is a cycle, and would keep the prompt's
    megabytes until a garbage collection.
    """

    __slots__ = ("_finish", "_parts", "_walk", "answer")

    def __init__(self, parts: Parts, walk: Walk, finish: Callable[[], Any]) -> None:
        self.answer: Completion[Any] = Completion()
        self._parts = parts
        self._walk = walk
        self._finish = finish
        parts.defer(self)

    def __call__(self) -> None:
        if self._walk.step(SLICE_BLOCKS):
            settle(self.answer, self._finish)
        else:
            self._parts.defer(self)


class RunScan:
    """Every run that the index has from now on to the end of the scan; it may change meanwhile.

    A run's children are taken up when the run is: whatever a split cuts off before is among them,
    and what it cuts off after was seen. Blocks that became READY since the start may be left out.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._stack: list[Run] = [root.head for root in index.roots()]

    @property
    def is_over(self) -> bool:
        return not self._stack

    def next(self) -> Run | None:
        """The next run; None when that one is gone, or there is none left."""
        if not self._stack:
            return None
        run = self._stack.pop()
        if not run.alive:
            return None
        self._stack.extend(children_of(run))
        return run if run.count else None


def settle(answer: Completion[Any], finish: Callable[[], Any]) -> None:
    """Resolves `answer` with what `finish` returns, raises, or completes later."""
    try:
        value = finish()
    except Exception as error:
        answer.fail(error)
        return
    if isinstance(value, Completion):
        value.then(lambda done: settle(answer, done.result))
    else:
        answer.resolve(value)
