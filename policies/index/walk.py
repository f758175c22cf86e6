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

# A third of the time of Span(...), which shows on paths of a thousand runs.
_new_tuple = tuple.__new__


class Walk:
    """A cursor down the tree along a chain; right again after any change between its steps.

    It compares every symbol byte for byte: what it has matched is the request's own prefix.
    """

    __slots__ = (
        "_changes", "_data", "_offset", "_runs", "_segment", "_tree", "_width", "chain", "depth",
        "finished", "root", "run",
    )  # fmt: skip

    _offset: int

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
        self._runs: list[Run] | None = []
        self._seek(0)

    def step(self, max_blocks: int = MAX_RUN_BLOCKS) -> bool:
        """Goes on for about `max_blocks` (never more than a run too far); True at the end.

        A finished walk may be stepped again: it follows what was added since.
        """
        if self._changes != self._tree.changes:
            self._resume()
        runs = [] if self._runs is None else self._runs
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
            children = run.children
            if children is None:
                finished = True
                break
            found = None
            if type(children) is dict and width <= WIDE_SYMBOL_BYTES:
                # A narrow key is the whole symbol: finding it has compared the first block.
                child = children.get(data[offset : offset + width])
                if child is None:
                    finished = True
                    break
                if child.count == 1 or data.startswith(child.symbols, offset):
                    found = child
            elif type(children) is tuple:
                for child in children:
                    if data.startswith(child.symbols, offset) and child.width == width:
                        found = child
                        break
            elif (
                type(children) is Run
                and data.startswith(children.symbols, offset)
                and children.width == width
            ):
                found = children
            if found is not None:
                run, depth = found, found.count
            else:
                child = find_child(children, width, data[offset : offset + width])
                if child is None:
                    finished = True
                    break
                run, depth = child, common_blocks(child.symbols, data, offset, width)
                finished = depth < run.count
            runs.append(run)
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
        if self._runs is None:
            return self._tree.path_to(self.run, self.depth, 0)
        spans = [_new_tuple(Span, (run, 0, run.count)) for run in self._runs]
        if spans:
            spans[-1] = Span(self.run, 0, self.depth)
        return spans

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
        self._runs = None
        self._seek(run.first + run.count)

    def _seek(self, position: int) -> None:
        self._data, self._width, self._offset = b"", 0, 0
        for number, segment in enumerate(self.chain.segments):
            self._segment = number
            self._data, self._width = segment.symbols, segment.width
            count = segment.block_count
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
