"""vLLM engines in processes of their own, for the tests that run only where vLLM is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from daemons import DaemonProcess

from kvstore.engines.vllm.process import EngineProcess

LIMITS = "tiers.host.prefault = false\ntiers.host.mlock = false\n"
BATCH = {"max_num_batched_tokens": 512}  # prompts of these tests are longer than a step computes


def tiny_model(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Llama of four layers, written once; another seed has other weights."""
    place = directory / f"tiny-{seed}-{'-'.join(f'{k}={v}' for k, v in sorted(changes.items()))}"
    if not place.exists():
        _write("make", str(place), str(seed), json.dumps(changes))
    return place


def tiny_adapter(directory: Path, seed: int) -> Path:
    """A random LoRA adapter for the tiny Llama; another seed has other weights."""
    place = directory / f"adapter-{seed}"
    _write("make_adapter", str(place), str(seed))
    return place


def _write(function: str, *arguments: str) -> None:
    """In a process of its own: torch and transformers stay out of this one."""
    code = f"import sys; import vllm_tiny; vllm_tiny.{function}(*sys.argv[1:])"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=environ, timeout=120)


class Engine(EngineProcess):
    """A vLLM engine; `settings` None is plain vLLM."""

    def __init__(self, model: Path, settings: dict[str, Any] | None, **options: Any) -> None:
        # One thread each: several engines share a test's processors.
        environ = {"OMP_NUM_THREADS": "1", **options.pop("environ", {})}
        super().__init__(model, settings, environ=environ, **options)


def prompt(seed: int, length: int, vocabulary: int = 250) -> list[int]:
    """Token ids that are their own for every seed."""
    return [3 + (i * 7919 + seed * 104729 + (i * seed) % 31) % vocabulary for i in range(length)]


def ask(tokens: list[int], **changes: Any) -> dict[str, Any]:
    return {"tokens": tokens, **changes}


def tell(name: str, **values: Any) -> None:
    """Keeps a figure where KVSTORE_VLLM_REPORT says, one JSON object a line."""
    line = json.dumps({"test": name, **values})
    print(line)
    if path := os.environ.get("KVSTORE_VLLM_REPORT"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def attached(model: Path, daemon: DaemonProcess, **options: Any) -> Engine:
    settings = {"address": daemon.address, "retry_seconds": 0.2, **options.pop("settings", {})}
    return Engine(model, settings, **{**BATCH, **options})


def tokens(outcomes: list[dict[str, Any]]) -> list[list[int]]:
    return [outcome["tokens"] for outcome in outcomes]


def cached(outcomes: list[dict[str, Any]]) -> list[int]:
    return [outcome["cached_tokens"] for outcome in outcomes]


def settle(daemon: DaemonProcess) -> int:
    """Waits until no more blocks come in; answers with how many there are."""
    before, since = -1, time.monotonic()
    while (count := daemon.status().block_count) != before or time.monotonic() - since < 0.3:
        if count != before:
            before, since = count, time.monotonic()
        time.sleep(0.05)
    return count


def restored(engine: Engine, daemon: DaemonProcess, *asks: dict[str, Any]) -> list[dict[str, Any]]:
    """The outcomes once vLLM's own cache is empty and the daemon has taken everything in."""
    settle(daemon)
    assert engine.call("forget_local")
    return engine.run(*asks)


def eventually(condition: Any, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
