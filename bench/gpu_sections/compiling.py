"""Compiles, over all processes, what the timed sections will run, so that they only measure."""

from __future__ import annotations

from typing import Any

from gpu_sections import decode, extend, restore
from gpu_sections.context import Context


def run(context: Context, answer: dict[str, Any]) -> None:
    answer.update(cases=0, left_out=0, failed=[])
    works: list[Any] = [(decode.warm, *case) for case in decode.cases()]
    works += [(extend.warm_extend, *case) for case in extend.CASES]
    works += [(extend.warm_cascade, *case) for case in extend.CASCADES]
    works += [(restore.warm, tokens) for tokens in restore.TOKENS]
    for work, *case in context.share(works):
        if context.left < 3:
            answer["left_out"] += 1
            continue
        answer["cases"] += 1
        try:
            work(*case)
        except Exception as error:
            text = f"{work.__name__} {case}: {type(error).__name__}: {error}"
            answer["failed"].append(text[:300])
            if "CUDA error" in text or "illegal" in text:
                raise
