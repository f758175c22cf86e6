"""Identity of a torch model: the spec of its KV, and a fingerprint of its weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from weakref import WeakKeyDictionary

import xxhash

from kvstore.core.errors import SpecError
from kvstore.core.spec import KVSpec

# Of a configuration, what names or places a model but changes none of its numbers.
NAMES = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}

_fingerprints: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def fingerprint(model: Any) -> str:
    """32 hex digits that stand for a torch module's parameters and buffers, every byte of them.

    Kept for each model: training it further, or loading an adapter into it, calls for a `revision`
    of your own.
    """
    known = _fingerprints.get(model)
    if known is None:
        digest = xxhash.xxh3_128()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(_bytes_of(tensor))
        known = _fingerprints[model] = digest.hexdigest()
    return known


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: memoryview = flat.view(torch.uint8).numpy().data
    return raw


def config_digest(config: Any) -> str:
    """What of a configuration changes K or V beside the weights, such as rotary embeddings."""
    values = {key: value for key, value in config.to_dict().items() if key not in NAMES}
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def spec_of(model: Any, *, name: str = "", revision: str = "", block_size: int = 64) -> KVSpec:
    """The spec of a transformers model's KV, in blocks [layer, k/v, head, token, dim].

    `name` and `revision` are the model's path and the fingerprint of its weights unless they are
    given. Raises SpecError for models whose cache is not plain attention.
    """
    config = model.config.get_text_config(decoder=True)
    layers = check_plain(model)
    heads = config.num_attention_heads
    return KVSpec(
        model=name or getattr(model.config, "_name_or_path", "") or type(model).__name__,
        revision=revision or fingerprint(model),
        num_layers=layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=block_size,
        layout="LKHND",
        attention={"config": config_digest(config)},
    )


def check_plain(model: Any) -> int:
    """Number of layers of a decoder whose every layer keeps all keys and values; else SpecError."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise SpecError(f"{kind} has an encoder; only decoders can be restored from a prefix")
    layers = DynamicCache(config=model.config).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if others:
        raise SpecError(
            f"{kind} keeps {', '.join(others)} in its cache; only models whose layers all attend "
            "to the whole prompt are supported"
        )
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    return count
