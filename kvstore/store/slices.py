"""Walks in slices: a long prompt is matched a part a turn, and others have theirs between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.core.completion import Completion
from kvstore.policies.index import Walk
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
