"""Long prompts leave nothing behind once they are answered."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from kvstore.core.clock import ManualClock
from kvstore.store.slices import SlicedWalk


class _Walk:
    """Three slices long."""

    def __init__(self) -> None:
        self.left = 3

    def step(self, max_blocks: int) -> bool:
        self.left -= 1
        return not self.left


class _Parts:
    """Runs what is deferred when told to."""

    def __init__(self) -> None:
        self.turns: list[Any] = []
        self.clock = ManualClock()

    def defer(self, turn: Any) -> None:
        self.turns.append(turn)


def test_a_sliced_walk_is_gone_with_its_answer() -> None:
    """I16: a long prompt's bytes are free when it is answered, without a garbage collection."""
    parts: Any = _Parts()
    walk: Any = _Walk()
    gone = weakref.ref(walk)
    gc.disable()
    try:
        answer = SlicedWalk(parts, walk, lambda: "done").answer
        del walk
        while parts.turns:
            parts.turns.pop(0)()
        assert answer.result() == "done"
        assert gone() is None
    finally:
        gc.enable()
