"""Pages of an SGLang host pool: their bytes in one order for every call, and their identity."""

from __future__ import annotations

import warnings
from typing import Any

from kvstore.core.errors import SpecError
from kvstore.core.spec import KVSpec

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class HostPages:
    """The pages of one host pool, read and written in the pool's own order of their axes.

    That is the order of the pool's flat pages, so pages stored through either interface of HiCache
    are the same bytes. Raises SpecError for pools whose pages cannot be told.
    """

    def __init__(self, pool: Any) -> None:
        layout = getattr(pool, "layout", None)
        if layout not in LAYOUTS:
            raise SpecError(
                f"the host pool's layout is {layout!r}; pass --hicache-mem-layout with one of "
                f"{', '.join(LAYOUTS)}"
            )
        if getattr(pool, "dcp_size", 1) != 1:
            raise SpecError(
                "decode context parallelism spreads a page over ranks; turn it off to use kvstore"
            )
        self._pool = pool
        self.layout: str = layout
        self.page_size: int = pool.page_size
        try:
            page = self._page(0)
        except NotImplementedError as error:
            raise SpecError(f"{type(pool).__name__} has no flat pages: {error}") from None
        self.page_bytes: int = page.numel() * page.element_size()

    def _page(self, index: int) -> Any:
        """One page as a tensor over the pool's own memory."""
        return self._pool.get_data_page(index, flat=False)

    def write(self, index: int, block: memoryview) -> None:
        """Copies a stored page to the pool, where the token `index` is its first."""
        page = self._page(index)
        page.copy_(tensor_of(block, page.dtype).view(page.shape))

    def read(self, index: int) -> Any:
        """The bytes of the page whose first token is `index`."""
        return bytes_of(self._page(index))

    def spec(self, config: Any, settings: dict[str, Any]) -> KVSpec:
        """What must agree for these pages to be exchangeable."""
        pool, page = self._pool, self._page(0)
        heads = getattr(pool, "head_num", 1)
        width = getattr(pool, "head_dim", None) or pool.kv_cache_dim
        rows = pool.layer_num * self.page_size * heads * width
        return KVSpec(
            model=_model_name(config),
            revision=_revision(settings),
            num_layers=pool.layer_num,
            layer_first=getattr(pool, "start_layer", 0) or 0,
            num_kv_heads=heads,
            head_dim=width,
            kv_factor=2 if page.numel() == 2 * rows else 1,
            dtype=_dtype(page, settings),
            block_size=self.page_size,
            layout=f"sglang-{self.layout}",
            block_bytes=self.page_bytes,
            attention={key: str(value) for key, value in settings.get("attention", {}).items()},
            shard_count=shards(config)[1],
            pp_size=config.pp_size,
            key_mode="external",
            hash_algorithm="sglang-sha256-pages",
        )


def shards(config: Any) -> tuple[int, int]:
    """(shard of this rank, number of shards): ranks whose pages hold different bytes."""
    rank, count = (0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size)
    return rank * config.attn_cp_size + config.attn_cp_rank, count * config.attn_cp_size


def _model_name(config: Any) -> str:
    if not config.model_name:
        raise SpecError("SGLang names no model; start it with --served-model-name")
    return str(config.model_name)


def _revision(settings: dict[str, Any]) -> str:
    revision = settings.get("revision")
    if not revision or not isinstance(revision, str):
        raise SpecError(
            "revision is not set; add the commit or digest of the weights as "
            '"revision" to --hicache-storage-backend-extra-config'
        )
    return revision


def _dtype(page: Any, settings: dict[str, Any]) -> str:
    named = settings.get("kv_cache_dtype")
    own = str(page.dtype).removeprefix("torch.")
    if own == "uint8" and not named:
        raise SpecError(
            "the host pool holds plain bytes; say what they are with "
            '"kv_cache_dtype" in --hicache-storage-backend-extra-config, such as "float8_e4m3fn"'
        )
    return str(named or own)


def tensor_of(block: memoryview, dtype: Any) -> Any:
    """A stored block's memory as a flat tensor, to be read only."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(block, dtype=dtype)


def bytes_of(tensor: Any) -> Any:
    """A tensor's bytes in the order of its axes, as an array; a copy if they lie apart."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
