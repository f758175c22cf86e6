"""`PrefixIndex`: the radix tree over symbols; the only owner of parents, children and places."""

from __future__ import annotations

import numpy as np

from kvstore.core.keys import chain_keys
from kvstore.core.space import Space
from kvstore.policies.index.check import check_tree
from kvstore.policies.index.extending import ExtendedTree
from kvstore.policies.index.graft import Grafted, graft
from kvstore.policies.index.run import Run, Span

# A run keeps the key it begins under when its chain crosses a multiple of this many blocks: keys
# of deep blocks then cost little to find, and short runs no memory.
KEY_STRIDE_BLOCKS = 64


class PrefixIndex(ExtendedTree):
    """Runs of blocks by exact prefix. One thread owns it; nothing here blocks or allocates much."""

    def graft_columns(
        self,
        space: Space,
        digests: list[bytes],
        root_numbers: np.ndarray,
        rows: np.ndarray,
        symbols: list[bytes],
        tiers: np.ndarray,
    ) -> Grafted:
        """Builds trees from READY blocks found in the tiers at start; see `graft`.

        The roots, of which each row has one by number, are of one space and empty.
        """
        roots = [self.root(space, digest) for digest in digests]
        return graft(self, roots, root_numbers, rows, symbols, tiers, self.free_blocks)

    def key_before(self, run: Run, i: int) -> bytes:
        """Key of the block before block `i` of `run`: the root's key for the first block."""
        stack: list[Run] = []
        here = run
        while here.key is None and here.parent is not None:
            stack.append(here)
            here = here.parent
        key = here.key or here.root.key
        for below in reversed(stack):
            parent = below.parent
            assert parent is not None
            key = self._key_after(parent, parent.count, key)
            if parent.first // KEY_STRIDE_BLOCKS != below.first // KEY_STRIDE_BLOCKS:
                below.key = key
        return self._key_after(run, i, key)

    def _key_after(self, run: Run, count: int, key: bytes) -> bytes:
        """Key of the `count`-th block of `run`, which begins under `key`."""
        for i in range(count):
            key = chain_keys(key, (run.symbol(i),))[0]
        return key

    def keys(self, span: Span) -> list[bytes]:
        """`BlockKey`s of a span's blocks."""
        run, start, stop = span
        symbols = (run.symbol(i) for i in range(start, stop))
        return chain_keys(self.key_before(run, start), symbols)

    def symbol(self, run: Run, i: int) -> bytes:
        """Symbol of block `i` of `run`."""
        return run.symbol(i)

    def check_integrity(self) -> None:
        """Recounts everything; raises AssertionError where something does not agree."""
        check_tree(self)
