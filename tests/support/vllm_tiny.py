"""Tiny random models with a tokenizer of bytes, as vLLM wants them on disk."""

from __future__ import annotations

import json
from pathlib import Path


def make(place: str, seed: str, changes: str) -> None:
    """Writes a Llama, or a Gemma 3 with sliding windows where `changes` has `family` gemma3."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<unk>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: n for n, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    partial = Path(f"{place}.new")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(partial)
    torch.manual_seed(int(seed))
    _model(len(vocabulary), json.loads(changes)).save_pretrained(partial)
    partial.rename(place)


def _model(vocabulary: int, changes: dict) -> object:
    import torch
    import transformers

    shape = {
        "vocab_size": vocabulary, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
        "initializer_range": 0.2,
    }  # fmt: skip
    family = changes.pop("family", "llama")
    if family == "gemma3":
        window = {"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"] * 2}
        config = transformers.Gemma3TextConfig(**{**shape, **window, **changes})
        return transformers.Gemma3ForCausalLM(config).to(torch.float32)
    config = transformers.LlamaConfig(**{**shape, "tie_word_embeddings": False, **changes})
    return transformers.LlamaForCausalLM(config).to(torch.float32)


def make_adapter(place: str, seed: str) -> None:
    """Writes a random LoRA adapter for the tiny Llama's attention, as PEFT lays it out."""
    import torch
    from safetensors.torch import save_file

    directory = Path(place)
    directory.mkdir()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 32,
        "target_modules": ["q_proj", "v_proj"], "bias": "none", "lora_dropout": 0.0,
        "base_model_name_or_path": "tiny",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    rng = torch.Generator().manual_seed(int(seed))
    tensors = {}
    for layer in range(4):
        for name, width in (("q_proj", 256), ("v_proj", 128)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(8, 256, generator=rng)
            tensors[f"{base}.lora_B.weight"] = torch.randn(width, 8, generator=rng)
    save_file(tensors, directory / "adapter_model.safetensors")
