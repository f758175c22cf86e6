"""A vLLM engine in a process of its own, in an environment of its own.

vLLM pins its own versions of much, so it is installed apart: `make vllm-env`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore.core.errors import KVStoreError

START_SECONDS = 300.0
CALL_SECONDS = 600.0
STOP_SECONDS = 30.0
LOG_BYTES = 4000
ROOT = Path(__file__).resolve().parents[3]


class VLLMProblem(KVStoreError):
    """vLLM is not there, did not start, or left; the message has what it said last."""


def interpreter() -> str:
    """The Python that has vLLM; raises VLLMProblem with the way to get it."""
    named = os.environ.get("KVSTORE_VLLM_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    own = ROOT / ".venv-vllm" / "bin" / "python"
    if own.exists():
        return str(own)
    raise VLLMProblem(
        "vLLM is not installed here; run `make vllm-env`, or name a Python that has it and "
        "kvstore in KVSTORE_VLLM_PYTHON"
    )


def is_there() -> bool:
    """Whether there is a Python with vLLM."""
    try:
        interpreter()
    except VLLMProblem:
        return False
    return True


class EngineProcess:
    """A vLLM engine of `model`; `settings` are the connector's, None for plain vLLM.

    It starts at once and is waited for with the first call. `host` is what Python is to run.
    """

    def __init__(
        self,
        model: str | Path,
        settings: dict[str, Any] | None,
        role: str = "kv_both",
        environ: dict[str, str] | None = None,
        host: tuple[str, ...] = ("-m", "kvstore.engines.vllm.host"),
        **options: Any,
    ) -> None:
        python = interpreter()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, *host],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env={**os.environ, **(environ or {})},
        )  # fmt: skip
        self._is_ready = False
        self._send({"model": str(model), "settings": settings, "role": role, "options": options})

    def wait(self) -> EngineProcess:
        """Waits until it has started; raises VLLMProblem if it did not."""
        if not self._is_ready:
            try:
                self._receive(START_SECONDS)
            except VLLMProblem:
                self.kill()
                raise
            self._is_ready = True
        return self

    def begin(self, *asks: dict[str, Any]) -> None:
        """Starts answering prompts, each the fields of an `Ask`; `end` has the outcomes."""
        self.wait()
        self._send({"call": "run", "asks": asks})

    def end(self) -> list[dict[str, Any]]:
        """Outcomes of the prompts that `begin` named, in their order."""
        return list(self._receive(CALL_SECONDS))

    def run(self, *asks: dict[str, Any]) -> list[dict[str, Any]]:
        self.begin(*asks)
        return self.end()

    def call(self, name: str) -> Any:
        """What a call without arguments gives: `state`, `forget_local`, `new_weights`."""
        self.wait()
        self._send({"call": name})
        return self._receive(CALL_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def _receive(self, seconds: float) -> Any:
        out = self.process.stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise VLLMProblem(f"vLLM did not answer in {seconds:g} s; {self._said()}")
        line = out.readline()
        if not line:
            raise VLLMProblem(f"vLLM has left; {self._said()}")
        said = json.loads(line)
        if "error" in said:
            raise VLLMProblem(f"vLLM did not start: {said['error']}")
        return said["result"]

    def _said(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - LOG_BYTES))
        return f"it said last: {self._log.read().decode(errors='replace')}"

    def close(self) -> None:
        """Has it end, and ends it if it does not."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._log):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
