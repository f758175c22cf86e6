"""`kvstore replay --engine`: a trace through a small real model, and what first tokens took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.cli.output import by_speed, finish, print_json, print_table

SCALE = 32


def replay_engine(
    trace: Path, daemon: Any, engine: str, limit: int, scale: int, seed: int, as_json: bool
) -> None:
    """The whole replay against a daemon; exit 1 if a restored byte or an answer was wrong."""
    from kvstore.cli.replay import progress_bar
    from kvstore.replay.formats import load_trace
    from kvstore.replay.scaled import EngineOptions

    requests = load_trace(trace, limit)
    options = EngineOptions(scale=scale, seed=seed)
    replay = _vllm(requests, options) if engine == "vllm" else _transformers(requests, options)
    with progress_bar("replaying", len(requests)) as bar:
        result = replay.run(daemon.target, bar.show)
    result = {"trace": str(trace), "engine": engine, **result, **daemon.facts()}
    if as_json:
        print_json(result)
    else:
        print_table(["", "replay"], vllm_rows(result) if engine == "vllm" else rows(result))
    finish(result["different_answers" if engine == "vllm" else "wrong_bytes"] == 0)


def _transformers(requests: Any, options: Any) -> Any:
    from kvstore.engines import smollm2
    from kvstore.replay.engine_live import EngineReplay

    model, _ = smollm2.load()
    return EngineReplay(requests, model, smollm2.NAME, options)


def _vllm(requests: Any, options: Any) -> Any:
    from kvstore.engines import smollm2
    from kvstore.engines.vllm.process import interpreter
    from kvstore.replay.engine_vllm import VLLMReplay

    smollm2.check_there()
    interpreter()
    return VLLMReplay(requests, options)


def vllm_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What a person wants to know of a replay through vLLM."""
    return [
        ("model", result["model"]),
        ("requests", f"{result['requests']:,}, {result['cut_prompts']:,} of them cut short"),
        ("input tokens", f"{result['input_tokens']:,}"),
        ("vLLM's own cache", f"{result['own_cache_tokens']:,} tokens"),
        ("tokens not computed", f"{result['cached_token_ratio']:.2%}"),
        ("  without the store", f"{result['cached_token_ratio_alone']:.2%}"),
        ("first token p50, p99", _times(result, "ttft")),
        ("  without the store", _times(result, "ttft_alone")),
        ("  all, of those without", f"{result['ttft_ratio']:.1%}"),
        ("between tokens p50, p99", _times(result, "itl")),
        ("  without the store", _times(result, "itl_alone")),
        ("other answers", f"{result['different_answers']:,}"),
    ]


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What a person wants to know of it."""
    by_tier, without_hits = result["token_hit_ratio_by_tier"], "-"
    if result["requests_without_hits"]:
        without_hits = (
            f"{result['requests_without_hits']:,}, in {result['ttft_ratio_without_hits']:.1%} of "
            f"the time; calls to the store took {result['store_share_without_hits']:.2%}"
        )
    return [
        ("model", result["model"]),
        ("requests", f"{result['requests']:,}, {result['cut_prompts']:,} of them cut short"),
        ("input tokens", f"{result['input_tokens']:,}"),
        ("tokens restored", f"{result['token_hit_ratio']:.2%}"),
        *((f"  from {tier}", f"{by_tier[tier]:.2%}") for tier in by_speed(by_tier)),
        ("first token p50, p99", _times(result, "ttft")),
        ("  without the store", _times(result, "ttft_alone")),
        ("  all, of those without", f"{result['ttft_ratio']:.1%}"),
        ("  requests without a hit", without_hits),
        ("between tokens p50, p99", _times(result, "itl")),
        ("  without the store", _times(result, "itl_alone")),
        ("other answers", f"{result['different_answers']:,}"),
        ("requests with trouble", f"{result['requests_with_problems']:,}"),
        ("wrong bytes", f"{result['wrong_bytes']:,}"),
    ]


def _times(result: dict[str, Any], name: str) -> str:
    middle, late = result[f"{name}_p50_seconds"], result[f"{name}_p99_seconds"]
    return "-" if middle is None else f"{middle:.3f} s, {late:.3f} s"
