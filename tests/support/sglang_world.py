"""SGLang's real host pools and cache controller, without a GPU, around a backend under test."""

from __future__ import annotations

import itertools
from queue import Queue
from typing import Any

import torch
from daemons import DaemonProcess
from sglang_wheel import load, page_keys

PAGE, LAYERS, HEADS, WIDTH, PAGES = 4, 3, 2, 8, 64
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
SGLANG = load()


def pool(kind: str, layout: str, dtype: Any = torch.float32, pages: int = PAGES) -> Any:
    """A host pool of `kind` mha or mla, its memory laid out by SGLang's own code."""
    made = object.__new__(
        SGLANG.mha.MHATokenToKVPoolHost if kind == "mha" else SGLANG.mla.MLATokenToKVPoolHost
    )
    made.__dict__.update(
        layout=layout, page_size=PAGE, page_num=pages, size=pages * PAGE, layer_num=LAYERS,
        start_layer=0, end_layer=LAYERS, dtype=dtype, device="cpu", pin_memory=False,
        allocator=None, _transfer_device=torch.device("cpu"),
    )  # fmt: skip
    if kind == "mha":
        made.__dict__.update(head_num=HEADS, head_dim=WIDTH, v_head_dim=WIDTH)
    else:
        made.__dict__.update(kv_lora_rank=12, qk_rope_head_dim=4, kv_cache_dim=16)
    made.kv_buffer = made.init_kv_buffer()
    made.kv_buffer.zero_()
    return made


def fill(target: Any, seed: int = 0) -> None:
    """Fills a pool with bytes that are another's nowhere."""
    raw = target.kv_buffer.view(torch.uint8)
    raw.random_(1, 256, generator=torch.Generator().manual_seed(seed))


def config(extra: dict[str, Any], **changes: Any) -> Any:
    values = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": False, "model_name": "m",
    }  # fmt: skip
    settings = {
        "backend_name": "kvstore", "module_path": "kvstore.engines.sglang",
        "class_name": "HiCacheKVStore", "revision": "r", **extra,
    }  # fmt: skip
    made = SGLANG.hicache_storage.HiCacheStorageConfig
    return made(**{**values, **changes}, extra_config=settings)


class Engine:
    """A rank: a host pool, a backend from SGLang's factory, and SGLang's controller over both."""

    def __init__(self, settings: Any, target: Any) -> None:
        self.pool = target
        self.backend = SGLANG.factory.StorageBackendFactory.create_backend(
            "dynamic", settings, target
        )
        self.backend.register_mem_pool_host(target)
        self.backend.register_mem_host_pool_v2(target, SGLANG.hicache_storage.PoolName.KV)
        self.backend.on_host_pools_registered()
        self.controller = object.__new__(SGLANG.controller.HiCacheController)
        self.controller.__dict__.update(
            storage_backend=self.backend, storage_host_pool=target, page_size=PAGE,
            prefetch_sync_queue=Queue(),
        )  # fmt: skip
        zero_copy = bool(settings.extra_config.get("interface_v1"))
        names = ("_page_get_zero_copy", "_page_set_zero_copy")
        get, put = names if zero_copy else ("_generic_page_get", "_generic_page_set")
        self.controller.page_get_func = getattr(self.controller, get)
        self.controller.page_set_func = getattr(self.controller, put)

    def backup(self, tokens: list[int], pages: list[int], prefix: list[str] | None = None) -> int:
        """Writes pages of the pool as those of `tokens`; answers with how many the engine counts.

        `prefix` are the keys before them, passed on as SGLang does if it is told to.
        """
        keys = page_keys(tokens, prefix[-1] if prefix else None, PAGE)
        operation = SGLANG.controller.StorageOperation(
            rows(pages), tokens, hash_value=keys, prefix_keys=prefix
        )
        self.controller._page_backup(operation)
        return operation.completed_tokens // PAGE

    def prefetch(
        self, tokens: list[int], pages: list[int], prefix: list[str] | None = None,
        last: str | None = None,
    ) -> int:  # fmt: skip
        """Asks what there is of `tokens` and reads it to `pages`; answers with how many came."""
        last = prefix[-1] if prefix else last
        operation = SGLANG.controller.PrefetchOperation("r", tokens, last, prefix)
        operation.hash_value, hit = self.controller._storage_hit_query(operation)
        assert hit == len(operation.hash_value) * PAGE
        operation.host_indices = rows(pages[: len(operation.hash_value)])
        done: int = self.controller._page_transfer(operation)
        return done

    def page(self, number: int) -> Any:
        """The bytes of a page."""
        return self.pool.get_data_page(number * PAGE, flat=True).view(torch.uint8)

    def close(self) -> None:
        self.backend.close()


def rows(pages: list[int]) -> Any:
    """Host indices of whole pages."""
    return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)], dtype=torch.int64)


def tokens(count: int, start: int = 0) -> list[int]:
    """Tokens of `count` pages, the same for the same start."""
    return [start + n for n in range(count * PAGE)]


class World:
    """Engines on one daemon, in spaces of their own."""

    numbers = itertools.count()

    def __init__(self, served: DaemonProcess) -> None:
        self.served = served
        self.revision = f"r{next(self.numbers)}"
        self.engines: list[Engine] = []

    def engine(
        self, kind: str = "mha", layout: str = "page_first", seed: int = 0, v1: int = 1,
        dtype: Any = torch.float32, pages: int = PAGES, extra: Any = None, **changes: Any,
    ) -> Engine:  # fmt: skip
        target = pool(kind, layout, dtype, pages)
        if seed:
            fill(target, seed)
        extra = {**self.settings(), "interface_v1": v1, **(extra or {})}
        settings = config(extra, is_mla_model=kind == "mla", **changes)
        return self.add(settings, target)

    def settings(self) -> dict[str, Any]:
        return {"address": self.served.address, "revision": self.revision}

    def add(self, settings: Any, target: Any) -> Engine:
        self.engines.append(Engine(settings, target))
        return self.engines[-1]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
