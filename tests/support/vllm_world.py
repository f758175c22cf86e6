"""vLLM engines in processes of their own, for the tests that run only where vLLM is installed."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0
CALL_SECONDS = 240.0


def python() -> Path:
    """The interpreter of the environment that has vLLM: `make vllm-env` makes it."""
    return Path(os.environ.get("KVSTORE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))


def tiny_model(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Llama of four layers, written once; another seed has other weights."""
    place = directory / f"tiny-{seed}-{'-'.join(f'{k}={v}' for k, v in sorted(changes.items()))}"
    if not place.exists():
        code = "import sys; import vllm_tiny; vllm_tiny.make(*sys.argv[1:])"
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        subprocess.run(
            [sys.executable, "-c", code, str(place), str(seed), json.dumps(changes)],
            check=True, env=environ, timeout=120,
        )  # fmt: skip
    return place


class Failed(Exception):
    """The engine did not start; its message is what it said."""


class Engine:
    """A vLLM engine; `settings` None is plain vLLM."""

    def __init__(
        self, model: Path, settings: dict[str, Any] | None, *, role: str = "kv_both",
        environ: dict[str, str] | None = None, log: Path | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.log_path = log or Path(f"/dev/shm/kvstore-test-vllm-{os.getpid()}-{id(self)}.log")
        self._log = open(self.log_path, "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(python()), str(Path(__file__).with_name("vllm_host.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        )  # fmt: skip
        self._send({"model": str(model), "settings": settings, "role": role, "options": options})
        self._is_ready = False

    def wait(self) -> Engine:
        """Waits until it has started; raises Failed if it did not."""
        if not self._is_ready:
            said = self._receive(START_SECONDS)
            if "error" in said:
                self.close()
                raise Failed(said["error"])
            self._is_ready = True
        return self

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def _receive(self, seconds: float) -> dict[str, Any]:
        out = self.process.stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            assert selector.select(seconds), f"vLLM hangs: {self.log[-4000:]}"
        line = out.readline()
        assert line, f"vLLM left: {self.log[-4000:]}"
        return dict(json.loads(line))

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def begin(self, *asks: dict[str, Any]) -> None:
        """Starts answering prompts; `end` waits for the outcomes."""
        self.wait()
        self._send({"call": "run", "asks": asks})

    def end(self) -> list[dict[str, Any]]:
        return list(self._receive(CALL_SECONDS)["outcomes"])

    def run(self, *asks: dict[str, Any]) -> list[dict[str, Any]]:
        self.begin(*asks)
        return self.end()

    def call(self, name: str) -> Any:
        self.wait()
        self._send({"call": name})
        said = self._receive(CALL_SECONDS)
        return said.get("result", said)

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()
        self.log_path.unlink(missing_ok=True)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()


def prompt(seed: int, length: int, vocabulary: int = 250) -> list[int]:
    """Token ids that are their own for every seed."""
    return [3 + (i * 7919 + seed * 104729 + (i * seed) % 31) % vocabulary for i in range(length)]


def ask(tokens: list[int], **changes: Any) -> dict[str, Any]:
    return {"tokens": tokens, **changes}
