"""Identity of a vLLM engine's KV: its spec, the revision of its weights, its adapters.

A block's bytes are taken as they are, so whatever changes their order or values is in the spec:
weights, configuration, backend and its instruction set, vLLM's version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from typing import Any

from kvstore.core.errors import SpecError
from kvstore.core.spec import BLOCK_SIZE_MAX, KVSpec
from kvstore.engines.files import digest_of_files
from kvstore.engines.identity import config_digest
from kvstore.engines.vllm.settings import Settings

STORE_BLOCK_BYTES_MIN = 256 << 10  # smaller blocks cost more in calls than in copies
COMMIT = re.compile(r"[0-9a-f]{40}")
SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
UNSEEDED = ("xxhash", "xxhash_cbor")  # vLLM seeds these at random unless PYTHONHASHSEED is set


def blocks_per_group(page_bytes: int, block_size: int, wanted_tokens: int) -> int:
    """How many of the engine's blocks make one of the store's: a power of two, or as wanted.

    `page_bytes` are all layers' bytes of one engine block on one rank.
    """
    if wanted_tokens:
        if wanted_tokens % block_size or not block_size <= wanted_tokens <= BLOCK_SIZE_MAX:
            raise SpecError(
                f"block_tokens is {wanted_tokens}; pass a multiple of vLLM's block size "
                f"{block_size}, at most {BLOCK_SIZE_MAX}"
            )
        return wanted_tokens // block_size
    count = 1
    while count * page_bytes < STORE_BLOCK_BYTES_MIN and 2 * count * block_size <= BLOCK_SIZE_MAX:
        count *= 2
    return count


def spec_of(
    config: Any,
    settings: Settings,
    *,
    layers: Iterable[int],
    heads: int,
    head_dim: int,
    dtype: str,
    block_size: int,
    page_bytes: int,
    layout: str,
    shard_count: int,
    kv_factor: int = 2,
) -> KVSpec:
    """The spec of one rank's blocks; `block_size` is vLLM's, `page_bytes` all layers' of one."""
    numbers, parallel = sorted(layers), config.parallel_config
    count = blocks_per_group(page_bytes, block_size, settings.block_tokens)
    return KVSpec(
        model=settings.model or config.model_config.model,
        revision=settings.revision or revision_of(config.model_config),
        num_layers=len(numbers),
        layer_first=numbers[0],
        num_kv_heads=heads,
        head_dim=head_dim,
        kv_factor=kv_factor,
        dtype=dtype,
        block_size=count * block_size,
        layout=layout,
        block_bytes=count * page_bytes,
        attention=_attention(config, block_size),
        shard_count=shard_count,
        pp_size=parallel.pipeline_parallel_size,
        key_mode=settings.key_mode,
        hash_algorithm=_hash_algorithm(config) if settings.key_mode == "external" else "",
    )


def _attention(config: Any, block_size: int) -> dict[str, str]:
    model, cache = config.model_config, config.cache_config
    values = {
        "config": config_digest(model.hf_config),
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "engine_block": str(block_size),
    }
    speculative = config.speculative_config
    if speculative is not None:
        draft = speculative.draft_model_config
        values["speculative"] = f"{speculative.method}:{revision_of(draft) if draft else ''}"
    return values


def _hash_algorithm(config: Any) -> str:
    """vLLM's hash with all that its values depend on; raises SpecError where they are random."""
    name, seed = config.cache_config.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")
    if name in UNSEEDED and seed is None:
        raise SpecError(
            f"vLLM seeds {name} at random in every process; set PYTHONHASHSEED to one number for "
            "all engines, or use --prefix-caching-hash-algo sha256_cbor"
        )
    return f"vllm-{name}/seed={seed if seed is not None else 'default'}"


def revision_of(model_config: Any) -> str:
    """Commit of the weights if their name or place has one, else the digest of their files."""
    if COMMIT.fullmatch(str(model_config.revision or "")):
        return str(model_config.revision)
    path = str(model_config.model)
    if found := SNAPSHOT.search(path):
        return found.group(1)
    files = _files_in(path, WEIGHTS)
    if not files:
        raise SpecError(
            f"the weights of {path!r} cannot be told from others'; add their commit or digest as "
            '"revision" to kv_connector_extra_config'
        )
    return digest_of_files(files)


def adapter_of(lora: Any) -> str:
    """What a LoRA adapter is told from others by: its name and the bytes of its files."""
    path = str(lora.lora_path)
    files = _files_in(path, (*WEIGHTS, ".json"))
    return f"{lora.lora_name}:{digest_of_files(files) if files else path}"


def _files_in(path: str, endings: tuple[str, ...]) -> list[str]:
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        return []
    return sorted(e.path for e in os.scandir(path) if e.name.endswith(endings))


def extra_digest(keys: Any) -> bytes:
    """32 bytes for what a block depends on beside its tokens, such as an image in it."""
    return hashlib.sha256(json.dumps(keys, default=_plain).encode()).digest()


def _plain(value: Any) -> str:
    return f"bytes {value.hex()}" if isinstance(value, bytes) else repr(value)
