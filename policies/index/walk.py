"""`Walk`: a lookup in progress, sliced so that a long prompt never holds the owner thread up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.core.keys import Chain
from kvstore.policies.index.run import (
    MAX_RUN_BLOCKS,
    WIDE_SYMBOL_BYTES,
    Root,
    Run,
    Span,
    common_blocks,
    find_child,
)

if TYPE_CHECKING:
    from kvstore.policies.index.tree import Tree


class Walk:
    """A cursor down the tree along a chain; right again after any change between its steps.

    It compares every symbol byte for byte: what it has matched is the request's own prefix.
    """

    __slots__ = (
        "_changes", "_data", "_offset", "_path", "_segment", "_tree", "_width", "chain", "depth",
        "finished", "root", "run",
    )  # fmt: skip

    def __init__(self, tree: Tree, root: Root, chain: Chain):
        self._tree = tree
        self.chain = chain
        self.restart(root)

    def restart(self, root: Root) -> None:
        """Begins again, under `root`."""
        self.root = root
        self.run: Run = root.head
        self.depth = 0
        self.finished = False
        self._changes = self._tree.changes
        self._path: list[Span] | None = []
        self._seek(0)

    def step(self, max_blocks: int = MAX_RUN_BLOCKS) -> bool:
        """Goes on for about `max_blocks` (never more than a run too far); True at the end.

        A finished walk may be stepped again: it follows what was added since.
        """
        if self._changes != self._tree.changes:
            self._resume()
        path = [] if self._path is None else self._path
        run, depth = self.run, self.depth
        data, width, offset = self._data, self._width, self._offset
        left = max_blocks
        finished = depth < run.count
        while not finished and left > 0:
            if offset == len(data):
                if not self._next_segment():
                    finished = True
                    break
                data, width, offset = self._data, self._width, 0
            child = run.children
            if child is None:
                finished = True
                break
            known = 0
            if type(child) is dict:
                symbol = data[offset : offset + width]
                # A narrow key is the whole symbol: finding it has compared the first block.
                if width <= WIDE_SYMBOL_BYTES:
                    child, known = child.get(symbol), 1
                else:
                    child = find_child(child, symbol)
                if child is None:
                    finished = True
                    break
            count: int = child.count  # type: ignore[union-attr]
            if (known == count) or (
                child.width == width and data.startswith(child.symbols, offset)  # type: ignore[union-attr]
            ):
                depth = count
            else:
                depth = 0
                if child.width == width and count > 1:  # type: ignore[union-attr]
                    depth = common_blocks(child.symbols, data, offset, width)  # type: ignore[union-attr]
                finished = True
                if not depth:
                    depth = run.count
                    break
            run = child  # type: ignore[assignment]
            path.append(Span(run, 0, depth))
            offset += depth * width
            left -= depth
        self.run, self.depth, self._offset = run, depth, offset
        self.finished = finished
        return finished

    @property
    def known_blocks(self) -> int:
        """Leading blocks of the chain that the tree has, READY ones and STAGING ones after."""
        self._check_fresh()
        return self.run.first + self.depth

    @property
    def ready_blocks(self) -> int:
        """Leading blocks of the chain that are READY."""
        self._check_fresh()
        run, depth = self.run, self.depth
        while not run.ready and run.parent is not None:
            run = run.parent
            depth = run.count
        return run.first + min(run.ready, depth)

    @property
    def path(self) -> list[Span]:
        """Runs and blocks matched, from the root down."""
        self._check_fresh()
        if self._path is None:
            self._path = self._tree.path_to(self.run, self.depth, 0)
        return self._path

    def finish(self) -> None:
        """Goes to the end of the chain as the tree is now, however long that takes."""
        while not self.step():
            pass

    def _check_fresh(self) -> None:
        if self._changes != self._tree.changes:
            self.finish()

    def _resume(self) -> None:
        """Finds itself again: any living run it came through is still right down to its start."""
        filed = self._tree.find_root(self.root.space, self.root.digest)
        if filed is not None and filed is not self.root:
            # The root lost its last block and got others since.
            self.restart(filed)
            return
        self._changes = self._tree.changes
        run = self.run
        while not run.alive:
            assert run.parent is not None
            run = run.parent
        if run.parent is not None:
            run = run.parent
        self.run, self.depth = run, run.count
        self._path = None
        self._seek(run.first + run.count)

    def _seek(self, position: int) -> None:
        self._data, self._width, self._offset = b"", 0, 0
        for number, segment in enumerate(self.chain.segments):
            self._segment = number
            self._data, self._width = segment.symbols, segment.width
            count = segment.count
            if position <= count:
                self._offset = position * segment.width
                return
            position -= count
        self._segment = len(self.chain.segments)
        self._offset = len(self._data)

    def _next_segment(self) -> bool:
        number = self._segment + 1
        if number >= len(self.chain.segments):
            return False
        self._segment = number
        segment = self.chain.segments[number]
        self._data, self._width = segment.symbols, segment.width
        return True
