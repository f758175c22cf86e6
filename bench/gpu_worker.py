"""A process of the GPU check: reads requests, a line of JSON each, and answers on lines of "@@"."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from gpu_sections.context import Context


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Runs one section; what goes wrong is in the answer."""
    context = Context(
        deadline=time.monotonic() + request["seconds"],
        results=request["results"],
        part=request.get("part", 0),
        parts=request.get("parts", 1),
        driver=request.get("driver", ""),
    )
    answer: dict[str, Any] = {}
    try:
        section = importlib.import_module(f"gpu_sections.{request['section']}")
        section.run(context, answer)
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"[:2000]
        answer["trace"] = [line.strip()[-300:] for line in traceback.format_exc().split("\n")[-12:]]
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as error:
        answer["poisoned"] = True
        answer["error"] = answer.get("error", "") + f" (GPU context lost: {error})"[:500]
    return answer


def main() -> None:
    for line in sys.stdin:
        answer = run(json.loads(line))
        print("\n@@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
