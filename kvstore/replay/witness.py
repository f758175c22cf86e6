"""`Witness`: remembers what an engine stored, and finds restored bytes that are others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from kvstore.core.spec import KVSpec
from kvstore.engines.transformers import block_reader

BLOCKS_KEPT = 1 << 20


class Witness:
    """Digests of stored blocks, by the tokens up to their end; the oldest are forgotten."""

    def __init__(self, spec: KVSpec) -> None:
        self._spec = spec
        self._digests: dict[bytes, int] = {}

    def stored(self, ids: Sequence[int], cache: Any) -> None:
        """The blocks of a prompt were stored; those that were there before stay what they were."""
        read = block_reader(cache, self._spec)
        for block, key in self._blocks(ids):
            if key not in self._digests:
                self._digests[key] = xxhash.xxh3_64_intdigest(read(block))
        while len(self._digests) > BLOCKS_KEPT:
            del self._digests[next(iter(self._digests))]

    def wrong_bytes(self, ids: Sequence[int], cache: Any) -> int:
        """Bytes of blocks that differ from what was stored for the same tokens."""
        read, wrong = block_reader(cache, self._spec), 0
        for block, key in self._blocks(ids):
            known = self._digests.get(key)
            if known is not None and known != xxhash.xxh3_64_intdigest(read(block)):
                wrong += self._spec.block_bytes
        return wrong

    def _blocks(self, ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """(position, digest of the tokens up to its end) of each full block."""
        seen, size = xxhash.xxh3_128(), self._spec.block_size
        for block in range(len(ids) // size):
            part = ids[block * size : (block + 1) * size]
            seen.update(b"".join(token.to_bytes(4, "little") for token in part))
            yield block, seen.digest()
