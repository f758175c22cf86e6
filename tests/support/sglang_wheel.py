"""SGLang's own storage code, out of its wheel: the parts named here are real, the rest is empty.

The package needs CUDA to be installed; what is tested against needs none of it.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(sys.prefix) / "sglang"
REAL = {
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.storage.backend_factory",
    "sglang.srt.mem_cache.pool_host.base",
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.pool_host.mla",
    "sglang.srt.managers.cache_controller",
}
NAMES = {
    "hicache_storage": "sglang.srt.mem_cache.hicache_storage",
    "factory": "sglang.srt.mem_cache.storage.backend_factory",
    "mha": "sglang.srt.mem_cache.pool_host.mha",
    "mla": "sglang.srt.mem_cache.pool_host.mla",
    "controller": "sglang.srt.managers.cache_controller",
}


def wheel() -> Path:
    found = sorted(FOLDER.glob("sglang-*.whl"))
    assert found, f"no SGLang wheel in {FOLDER}; run: make engines-env"
    return found[-1]


class Empty(types.ModuleType):
    """A module of which every name is there: classes are empty, functions answer False."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "envs":
            return Unset()
        made: Any = type(name, (), {}) if name[:1].isupper() and not name.isupper() else _no
        setattr(self, name, made)
        return made


class Unset:
    """Environment variables, none of them set."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda: None)


def _no(*arguments: Any, **more: Any) -> bool:
    return False


class FromWheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sglang` and everything below it."""

    def __init__(self, path: Path) -> None:
        self._files = zipfile.ZipFile(path)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "sglang":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name not in REAL)

    def create_module(self, spec: Any) -> types.ModuleType:
        return types.ModuleType(spec.name) if spec.name in REAL else Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in REAL:
            path = module.__name__.replace(".", "/") + ".py"
            exec(compile(self._files.read(path), path, "exec"), module.__dict__)


def load() -> types.SimpleNamespace:
    """The real modules by short names; `sglang` can be imported from now on."""
    if not any(isinstance(finder, FromWheel) for finder in sys.meta_path):
        sys.meta_path.insert(0, FromWheel(wheel()))
    loaded = {short: importlib.import_module(name) for short, name in NAMES.items()}
    for pools in (loaded["mha"], loaded["mla"]):
        pools.ALLOC_MEMORY_FUNCS = {
            "cpu": lambda dims, dtype, **more: torch.empty(dims, dtype=dtype)
        }
    loaded["controller"].get_storage_hash_str = page_keys
    return types.SimpleNamespace(**loaded)


def _memory(dims: tuple[int, ...], dtype: Any, **more: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


def page_keys(tokens: list[int], last: str | None = None, page_size: int = 1) -> list[str]:
    """Keys of full pages as SGLang chains them: SHA-256 over the digest before and the tokens."""
    keys, digest = [], bytes.fromhex(last) if last else b""
    for start in range(0, len(tokens) - page_size + 1, page_size):
        raw = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + page_size])
        digest = hashlib.sha256(digest + raw).digest()
        keys.append(digest.hex())
    return keys
