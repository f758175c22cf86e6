"""The tests that need a GPU (marker `gpu`), the HBM tier's contract among them, as a suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_sections.context import Context

ROOT = Path(__file__).resolve().parent.parent.parent


def run(context: Context, answer: dict[str, Any]) -> None:
    command = [
        sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider",
        "--no-header", "tests/gpu",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=context.left, env=os.environ
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        answer["error"] = "no end within its time"
        answer["output"] = output.decode()[-2000:] if isinstance(output, bytes) else output[-2000:]
        return
    answer["exit"] = done.returncode
    answer["summary"] = (done.stdout.strip().splitlines() or [""])[-1]
    answer["failed"] = re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.M)[:20]
    if done.returncode:
        answer["output"] = (done.stdout + done.stderr)[-4000:]
