"""`bench quality`: what each format of stored blocks costs in a real model's predictions of a text.

Of every window of the text, the model computes the KV of a context, which is put into blocks of
each format; tokens after it attend to those in place, and their logits are held against those of
the model over the whole window. Counted, not timed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pydoc_data.topics import topics
from typing import Any

from kvstore.bench.measure import document
from kvstore.core.errors import ConfigError
from kvstore.engines import smollm2
from kvstore.engines.generating import predictions
from kvstore.engines.identity import spec_of
from kvstore.engines.in_place import Context, context_from, in_format, quantising, rounding
from kvstore.engines.logits import LogitErrors, one_thread
from kvstore.engines.paged import PagedDecoder
from kvstore.engines.transformers import block_reader

BLOCK_TOKENS = 64
WINDOWS, CONTEXT_TOKENS, SCORED_TOKENS = 16, 1024, 128
QUICK_WINDOWS, QUICK_CONTEXT_TOKENS, QUICK_SCORED_TOKENS = 2, 128, 32
QUANTISED = ("int8_th", "fp8_bh", "int4_kivi")
ROUNDED = "bfloat16"  # raw blocks as most engines keep them: what quantising has to be held against
TEXT = "pydoc_data.topics of the Python standard library (PSF licence), in order of name"

Encode = Callable[[str], list[int]]


def run(quick: bool = False, model: Any = None, encode: Encode | None = None) -> dict[str, Any]:
    """Perplexity, divergence and logit errors of every format over the same windows of a text."""
    if find_spec("triton") is None:
        raise ConfigError("triton is not installed, and kernels need it; run: make kernels-env")
    name = type(model).__name__
    if model is None or encode is None:
        (model, tokenizer), name = smollm2.load(), smollm2.NAME
        encode = tokenizer.encode
    text = "\n\n".join(topics[name] for name in sorted(topics))
    sizes = (WINDOWS, CONTEXT_TOKENS, SCORED_TOKENS)
    windows, context, scored = (
        (QUICK_WINDOWS, QUICK_CONTEXT_TOKENS, QUICK_SCORED_TOKENS) if quick else sizes
    )
    bench = _Bench(model, context, scored)
    with one_thread():
        for window in _windows(encode(text), windows, context + scored + 1):
            bench.add(window)
    return document(
        bench.figures(), {}, formats=bench.by_format(), model=name,
        text=TEXT, text_sha256=hashlib.sha256(text.encode()).hexdigest(), windows=windows,
        context_tokens=context, scored_tokens=windows * scored, block_size=BLOCK_TOKENS,
    )  # fmt: skip


def _windows(ids: list[int], count: int, length: int) -> list[list[int]]:
    """Stretches of the text, evenly apart."""
    step = len(ids) // count
    if step < length:
        raise ConfigError(f"the text has {len(ids)} tokens; {count} windows of {length} are more")
    return [ids[n * step : n * step + length] for n in range(count)]


class _Bench:
    """One model; each format's errors so far."""

    def __init__(self, model: Any, context_tokens: int, scored_tokens: int) -> None:
        self._model, self._scored = model, scored_tokens
        self._spec = spec_of(model, block_size=BLOCK_TOKENS)
        self._context = context_tokens
        self._errors = {name: LogitErrors() for name in ("exact", "raw", ROUNDED, *QUANTISED)}

    def add(self, window: list[int]) -> None:
        """Compares one window: a context, tokens to score, and the token after the last."""
        new, following = window[self._context : -1], window[self._context + 1 :]
        exact, cache = predictions(self._model, window[:-1], self._scored)
        self._errors["exact"].add(exact, exact, following)
        for name, context in self._contexts(block_reader(cache, self._spec)):
            decoder = PagedDecoder(self._model, self._spec, context, room_tokens=self._scored)
            self._errors[name].add(decoder.extend(new), exact, following)

    def _contexts(self, read: Callable[[int], Any]) -> Iterator[tuple[str, Context]]:
        """One window's context in each format."""
        blocks = self._context // BLOCK_TOKENS
        yield "raw", context_from(read, blocks, self._spec)
        yield ROUNDED, context_from(rounding(read, self._spec, ROUNDED), blocks, self._spec)
        for name in QUANTISED:
            spec = in_format(self._spec, name)
            yield name, context_from(quantising(read, spec), blocks, spec)

    def by_format(self) -> dict[str, dict[str, float]]:
        """All figures of each format, and a block's size over one in bfloat16."""
        sizes = {ROUNDED: 1.0} | {
            name: in_format(self._spec, name).block_bytes / self._bfloat16_bytes
            for name in QUANTISED
        }
        return {
            name: errors.figures() | ({"block_size_ratio": sizes[name]} if name in sizes else {})
            for name, errors in self._errors.items()
        }

    @property
    def _bfloat16_bytes(self) -> int:
        spec = self._spec
        return 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.block_size

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in QUANTISED:
            figures = self._errors[name].figures()
            found[f"{name}_perplexity_ratio"] = figures["perplexity_ratio"]
            found[f"{name}_kl_mean"] = figures["kl_mean"]
        return found
