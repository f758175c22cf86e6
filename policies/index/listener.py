"""What the index tells while it changes: everything that accounting and policies need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.core.space import Space
from kvstore.policies.index.run import Run


class IndexListener(Protocol):
    """Hears of every change of the index, right after it unless said otherwise."""

    def on_slots(self, space: Space, tier: int, delta: int) -> None:
        """`delta` slots more (or fewer) are reserved or filled in `tier`."""
        ...

    def on_ready(self, run: Run, start: int, stop: int) -> None:
        """Blocks [start, stop) of `run` became READY."""
        ...

    def on_adopt(self, runs: Sequence[Run]) -> None:
        """Runs of one space, found at start, are there: as `on_ready` and `on_leaf` of each."""
        ...

    def on_split(self, run: Run, tail: Run) -> None:
        """`tail` took the end of `run` over; it has the same `hits`, `touched` and `policy`."""
        ...

    def on_merge(self, run: Run, tail: Run) -> None:
        """`run` took its only child `tail` over, which is dead."""
        ...

    def on_remove(self, run: Run) -> None:
        """`run` goes, its children went before; still linked to its parent."""
        ...

    def on_leaf(self, run: Run, tier: int) -> None:
        """`run` is a leaf in `tier` now; told again now and then, never told when it ends."""
        ...

    def on_unanchor(self, run: Run) -> None:
        """The last anchor on a block of `run` was let go, or one below went with its block."""
        ...


class SilentListener:
    """Hears everything and does nothing."""

    def on_slots(self, space: Space, tier: int, delta: int) -> None:
        pass

    def on_ready(self, run: Run, start: int, stop: int) -> None:
        pass

    def on_adopt(self, runs: Sequence[Run]) -> None:
        pass

    def on_split(self, run: Run, tail: Run) -> None:
        pass

    def on_merge(self, run: Run, tail: Run) -> None:
        pass

    def on_remove(self, run: Run) -> None:
        pass

    def on_leaf(self, run: Run, tier: int) -> None:
        pass

    def on_unanchor(self, run: Run) -> None:
        pass
