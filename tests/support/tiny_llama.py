"""A random Llama of two layers, and words for it: bytes are its tokens."""

from __future__ import annotations

from typing import Any

VOCABULARY = 256


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """The same numbers for the same seed and changes."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes})).eval()


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("latin-1")
