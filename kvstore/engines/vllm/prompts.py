"""A vLLM request's prompt as the store sees it."""

from __future__ import annotations

from typing import Any

from kvstore.engines.vllm.identity import adapter_of, extra_digest
from kvstore.engines.vllm.messages import Prompt

ADAPTERS_KEPT = 1024


class Prompts:
    """Makes prompts: of tokens in blocks of `block_size`, or of hashes of `hash_block_size`."""

    def __init__(self, key_mode: str, block_size: int, hash_block_size: int) -> None:
        self._is_external = key_mode == "external"
        self._block_size, self._hash_block_size = block_size, hash_block_size
        self._adapters: dict[tuple[str, int, str], str] = {}

    def of(self, request: Any, tokens: int) -> Prompt:
        """The request's first `tokens` tokens; with hashes only full blocks of them count."""
        adapter, salt = self._adapter(request), request.cache_salt or ""
        if self._is_external:
            return Prompt(None, self._hashes(request, tokens), adapter, salt)
        digests = self._digests(request, tokens)
        return Prompt(tuple(request.all_token_ids[:tokens]), None, adapter, salt, digests)

    def full_blocks(self, request: Any, tokens: int) -> int:
        """Full store blocks in the first `tokens` tokens that can be named."""
        count = tokens // self._block_size
        if self._is_external:
            count = min(count, len(request.block_hashes) // self._hashes_each)
        return count

    def _adapter(self, request: Any) -> str:
        """The adapter's identity: of the files that vLLM read when it loaded it."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return ""
        key = (lora.lora_name, lora.lora_int_id, str(lora.lora_path))
        if key not in self._adapters or getattr(lora, "load_inplace", False):
            while len(self._adapters) >= ADAPTERS_KEPT:
                del self._adapters[next(iter(self._adapters))]
            self._adapters[key] = adapter_of(lora)
        return self._adapters[key]

    @property
    def _hashes_each(self) -> int:
        return self._block_size // self._hash_block_size

    def _hashes(self, request: Any, tokens: int) -> tuple[bytes, ...]:
        # A hash stands for all tokens before it, too, so the last of a store block names it.
        each, count = self._hashes_each, self.full_blocks(request, tokens)
        return tuple(bytes(request.block_hashes[(n + 1) * each - 1]) for n in range(count))

    def _digests(self, request: Any, tokens: int) -> tuple[tuple[int, bytes], ...]:
        """Digests of the blocks that hold more than their token ids, such as images."""
        if not request.mm_features and request.prompt_embeds is None:
            return ()
        from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
            generate_block_hash_extra_keys,
        )

        digests, size, feature = [], self._block_size, 0
        for block in range(tokens // size):
            start = block * size
            keys, feature = generate_block_hash_extra_keys(request, start, start + size, feature)
            if keys:
                digests.append((block, extra_digest(keys)))
        return tuple(digests)
