"""What an engine does without a store, to compare with: prefill and greedy decoding."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kvstore.core.clock import perf_seconds
from kvstore.engines.transformers import Prefill, cache_argument


@dataclass
class Answer:
    """Tokens that were generated, and the seconds of each but the first."""

    tokens: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


def prefill_alone(model: Any, ids: Any) -> Prefill:
    """Prefills the ids of one prompt, [n], in one call and without a store."""
    import torch
    from transformers import DynamicCache

    tensor = torch.as_tensor(ids, device=model.device)[None]
    began = perf_seconds()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        output = model(tensor, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
    logits = output.logits[:, -1]
    _synchronize(model)
    count = tensor.shape[1]
    return Prefill(logits, cache, count, computed_tokens=count, seconds=perf_seconds() - began)


def predictions(model: Any, ids: Any, count: int) -> tuple[Any, Any]:
    """(logits of the last `count` of ids [n] in one call, without a store; the cache of all)."""
    import torch
    from transformers import DynamicCache

    tensor = torch.as_tensor(ids, device=model.device)[None]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        output = model(
            tensor, use_cache=True, logits_to_keep=count, **{cache_argument(model): cache}
        )
    return output.logits[0], cache


def copy_of(model: Any, cache: Any) -> Any:
    """A cache of a model's with the same content."""
    from transformers import DynamicCache

    made = DynamicCache(config=model.config)
    for n, layer in enumerate(cache.layers):
        made.update(layer.keys, layer.values, n)
    return made


def extend(model: Any, cache: Any, ids: Any) -> float:
    """Computes more tokens, [n], on a cache; answers with the seconds that took."""
    import torch

    tensor = torch.as_tensor(ids, device=model.device)[None]
    began = perf_seconds()
    with torch.no_grad():
        model(tensor, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
    _synchronize(model)
    return perf_seconds() - began


def decode(model: Any, prefill: Prefill, count: int, stop: Collection[int] = ()) -> Answer:
    """Up to `count` tokens after a prompt, the likeliest each; a token of `stop` ends it."""
    import torch

    answer, logits = Answer(), prefill.logits
    argument = {cache_argument(model): prefill.cache}
    began = None
    while len(answer.tokens) < count:
        token = int(logits.argmax())
        if began is not None:
            answer.step_seconds.append(perf_seconds() - began)
        answer.tokens.append(token)
        if token in stop or len(answer.tokens) == count:
            break
        began = perf_seconds()
        with torch.no_grad():
            ids = torch.tensor([[token]], device=model.device)
            logits = model(ids, use_cache=True, logits_to_keep=1, **argument).logits[:, -1]
    return answer


def _synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        import torch

        torch.cuda.synchronize(model.device)
