"""SGLang: `HiCacheKVStore`, a storage backend for HiCache over the daemon.

exists -> lookup; get -> lookup, restore into host pages, check, release; set -> put
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (  # type: ignore[import-not-found]
    HiCacheStorage,
)

from kvstore.client import KVClient, Space
from kvstore.core.entropy import random_token
from kvstore.core.errors import KVStoreError, SpecError, StoreUnavailable
from kvstore.engines.host_pages import HostPages, bytes_of, shards, tensor_of
from kvstore.engines.page_chains import Chain, PageChains, key_bytes
from kvstore.engines.reach import Reach

logger = logging.getLogger(__name__)

REQUESTS_KEPT = 1 << 14
SETTINGS = (
    "address", "tenant", "revision", "kv_cache_dtype", "attention", "call_timeout_seconds",
    "put_timeout_seconds", "retry_seconds",
)  # fmt: skip
# What SGLang itself reads from the same object.
OTHERS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")


class HiCacheKVStore(HiCacheStorage):  # type: ignore[misc]
    """HiCache's pages in a kvstore daemon: one page is one block, its key the block's hash.

    For SGLang's `dynamic` backend. Whatever goes wrong with the daemon is a page that is not there,
    or was not stored; wrong settings raise SpecError when the pool is registered.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        settings = dict(storage_config.extra_config or {})
        unknown = sorted(set(settings) - {*SETTINGS, *OTHERS})
        if unknown:
            raise SpecError(f"unknown setting {unknown[0]!r}; there are {', '.join(SETTINGS)}")
        self._config, self._settings = storage_config, settings
        self._chains = PageChains()
        self._requests = Requests(shards(storage_config)[0] == 0)
        self._pages: HostPages | None = None
        self._reach: Reach | None = None
        self._is_troubled = False

    # ---- Pools ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if self._reach is not None:
            self._reach.close()
        pages = HostPages(mem_pool_host)
        spec = pages.spec(self._config, self._settings)
        settings, shard = self._settings, shards(self._config)[0]

        def connect() -> KVClient:
            return KVClient.connect(
                settings.get("address"),
                call_timeout_seconds=settings.get("call_timeout_seconds", 0.1),
                put_timeout_seconds=settings.get("put_timeout_seconds", 5.0),
                client_name="sglang",
            )

        def attach(client: KVClient) -> Space:
            return client.attach(spec, tenant=settings.get("tenant", "default"), shard=shard)

        reach = Reach(connect, attach, retry_seconds=settings.get("retry_seconds", 5.0))
        self._pages, self._reach = pages, reach
        try:
            reach.space()
        except StoreUnavailable as error:
            self._trouble(error)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if str(host_pool_name) != "kv":
            raise SpecError(
                f"the model keeps a pool {str(host_pool_name)!r} beside its KV; kvstore's backend "
                "stores plain KV only, so use another --hicache-storage-backend"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # ---- HiCache, pages straight from and to the host pool ----

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._count(_hashes(keys), _before(extra_info))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        pages, first = self._places(keys, host_indices)

        def take(position: int, block: memoryview) -> None:
            pages.write(first[position], block)

        count = self._load(_hashes(keys[: len(first)]), _before(extra_info), take)
        return _flags(count, len(keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        pages, first = self._places(keys, host_indices)

        def give(position: int) -> Any:
            return pages.read(first[position])

        count = self._save(_hashes(keys[: len(first)]), _before(extra_info), give)
        return _flags(count, len(keys))

    # ---- HiCache, pages one by one ----

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The page as a flat tensor, in `target_location` if that is one; None if it is absent."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        found: list[Any] = [None] * len(keys)
        targets = target_locations or [None] * len(keys)

        def take(position: int, block: memoryview) -> None:
            found[position] = self._filled(targets[position], block)

        count = self._load(_hashes(keys), (), take)
        return [*found[:count], *[None] * (len(keys) - count)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        if values is None or any(value is None for value in values):
            return False
        return self._save(_hashes(keys), (), lambda n: bytes_of(values[n])) == len(keys)

    # ---- The rest of HiCache ----

    def clear(self) -> bool:
        """Refused: the store's pages are other engines' as well."""
        logger.warning("kvstore is not cleared by an engine; run `kvstore clear --space`")
        return False

    def close(self) -> None:
        if self._reach is not None:
            self._reach.close()

    # ---- Over the store ----

    def _places(self, keys: Sequence[str], host_indices: Any) -> tuple[Any, list[int]]:
        """The pool's pages, and the first token of each page; none if the two do not agree."""
        pages = self._pages
        if pages is None or len(host_indices) != len(keys) * pages.page_size:
            return pages, []
        return pages, host_indices[:: pages.page_size].tolist()

    def _count(self, keys: list[bytes], before: Sequence[bytes]) -> int:
        """How many leading pages are there and worth loading."""
        request = self._requests.ask(keys)

        def present(space: Space, chain: Chain) -> int:
            with self._lookup(space, chain, request) as match:
                return _usable(match, chain)

        return self._first(keys, before, present)

    def _load(
        self, keys: list[bytes], before: Sequence[bytes], take: Callable[[int, memoryview], None]
    ) -> int:
        """Hands over leading pages; those counted in the answer were right when it was given."""
        request = self._requests.of(keys, before)

        def load(space: Space, chain: Chain) -> int:
            with self._lookup(space, chain, request) as match:
                if not _usable(match, chain):
                    return 0
                blocks = space.restore(match, partial=True)
                for position, block in enumerate(blocks):
                    take(position, block)
                match.check()
                return len(blocks)

        return self._first(keys, before, load)

    def _save(self, keys: list[bytes], before: Sequence[bytes], give: Callable[[int], Any]) -> int:
        """Stores pages; answers with how many leading ones are there now or soon will be."""
        request = self._requests.of(keys, before)

        def save(space: Space, chain: Chain) -> int:
            result = space.put(
                hashes=chain.hashes,
                blocks=lambda position: give(position - chain.offset),
                first_block=chain.offset,
                request_id=request,
            )
            return result.stored + result.present + result.pending

        return self._first(keys, before, save)

    def _first(
        self,
        keys: list[bytes],
        before: Sequence[bytes],
        action: Callable[[Space, Chain], int],
    ) -> int:
        """What `action` answers for the first chain for which it is not nothing."""
        if not keys or self._reach is None:
            return 0
        try:
            space = self._reach.space()
            for chain in self._chains.candidates(keys, before):
                count = action(space, chain)
                self._is_troubled = False
                if count:
                    self._chains.settle(chain.hashes[: chain.offset + count])
                    return count
        except KVStoreError as error:
            self._trouble(error)
        return 0

    def _lookup(self, space: Space, chain: Chain, request: str | None) -> Any:
        local = chain.offset * space.spec.block_size
        return space.lookup(hashes=chain.hashes, local_tokens=local, request_id=request)

    def _filled(self, target: Any, block: memoryview) -> Any:
        """The block's values in `target`, or in a tensor of their own."""
        import torch

        if not isinstance(target, torch.Tensor):
            return tensor_of(block, self.mem_pool_host.dtype).clone()
        target.copy_(tensor_of(block, target.dtype).view(target.shape))
        return target

    def _trouble(self, error: KVStoreError) -> None:
        if not self._is_troubled:
            logger.warning("pages are computed without kvstore for now: %s", error)
        self._is_troubled = True


class Requests:
    """Ids that tell the daemon which calls are of one request; the oldest pages are forgotten.

    HiCache names none: a request's first call asks what exists, and the pages asked for are its.
    Only the first shard speaks of requests.
    """

    def __init__(self, speaks: bool) -> None:
        self._name = random_token(8).hex() if speaks else ""
        self._numbers = itertools.count(1)
        self._of: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def ask(self, keys: Sequence[bytes]) -> str | None:
        """The id of a new request for these pages."""
        if not self._name:
            return None
        request = f"{self._name}-{next(self._numbers)}"
        with self._lock:
            for key in keys:
                self._of.pop(key, None)
                self._of[key] = request
            while len(self._of) > REQUESTS_KEPT:
                del self._of[next(iter(self._of))]
        return request

    def of(self, keys: Sequence[bytes], before: Sequence[bytes]) -> str | None:
        """The id of the last request that asked for these pages, or for the one before them."""
        if not self._name or not keys:
            return None
        known = self._of.get(keys[0]) or (self._of.get(before[-1]) if before else None)
        return known or self.ask(keys)


def _usable(match: Any, chain: Chain) -> int:
    """How many blocks the plan loads right from where the pages asked for begin."""
    ranges = match.ranges
    return len(ranges[0]) if ranges and ranges[0].start == chain.offset else 0


def _hashes(keys: Sequence[str]) -> list[bytes]:
    return [key_bytes(key) for key in keys]


def _before(extra_info: Any) -> tuple[bytes, ...]:
    return tuple(map(key_bytes, getattr(extra_info, "prefix_keys", None) or ()))


def _flags(count: int, total: int) -> list[bool]:
    return [True] * count + [False] * (total - count)
