"""The demo and the replay of a real engine, on a random model: every part of them, quickly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import DaemonProcess
from tiny_llama import decode, encode, tiny_llama

from kvstore.cli.demo_engine import _show
from kvstore.cli.main import run
from kvstore.cli.replay_engine import rows
from kvstore.core.errors import InvalidRequest
from kvstore.replay.chat import Chat, ChatDemo
from kvstore.replay.chat_report import curves_of, page
from kvstore.replay.chat_script import system_prompt
from kvstore.replay.engine_live import EngineReplay
from kvstore.replay.formats import TraceRequest
from kvstore.replay.own_daemon import OwnDaemon
from kvstore.replay.own_disk import disk_section, own_disk
from kvstore.replay.scaled import EngineOptions, ScaledPrompts


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """On one thread: two that wait for each other take minutes on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_llama()
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_users_chat(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """First turns share the prompt from host, also after a kill; after a reboot turns come from
    disk; answers are the same and every restored block is what was stored."""
    questions = {"a": ("one?", "two?", "three?"), "b": ("uno?", "due?", "tre?")}
    chat = Chat(model, "tiny", encode, decode, (), system_prompt(5), questions)
    told: list[Any] = []
    with own_disk() as disk:
        sections = {"tiers.disk": disk_section(disk, 1 << 30)}
        with OwnDaemon(64 << 20, sections) as daemon:
            result = ChatDemo(chat, daemon, disk).run(told.append)
    turns = result["turns"]
    assert [(turn["user"], turn["turn"]) for turn in turns] == [
        ("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3),
    ]  # fmt: skip
    assert turns[0]["restored_tokens"] == {"host": 0, "disk": 0}
    shared = len(system_prompt(5)) // 32 * 32
    for turn in turns[1:4]:
        assert turn["restored_tokens"]["host"] >= shared
        assert not turn["restored_tokens"]["disk"]
    assert turns[4]["restored_tokens"]["disk"] >= shared
    assert sum(turns[5]["restored_tokens"].values()) >= shared
    for turn in turns:
        restored = sum(turn["restored_tokens"].values())
        assert restored + turn["computed_tokens"] == turn["prompt_tokens"]
        assert turn["reason"]
        assert not turn["problem"]
    assert result["wrong_bytes"] == 0
    assert result["different_answers"] == 0
    assert result["logits_difference_max"] < 1e-4
    assert [type(one).__name__ for one in told].count("str") == 2
    assert {"host>hbm", "disk>host"} <= set(result["costs"]["links"])
    assert result["costs"]["recompute"]["state"] == "fitted"
    assert "Seconds by prompt length" in page(result)
    _show(result)
    assert "compute n tokens on p" in capsys.readouterr().out


def test_curves_are_the_models() -> None:
    """Predictions by length follow a, b, c and each link's L and B; from disk takes both links."""
    facts = {"samples": 9, "state": "fitted", "state_reason": ""}
    costs = {
        "recompute": {
            "call_seconds": 0.1, "token_seconds": 0.01, "pair_seconds": 1e-6, **facts,
        },
        "links": {
            "host>hbm": {"latency_seconds": 0.001, "byte_seconds": 1e-9, **facts},
            "disk>host": {"latency_seconds": 0.002, "byte_seconds": 2e-9, **facts},
        },
    }  # fmt: skip
    curves = curves_of(costs, 1000.0)
    assert curves["compute"](100) == pytest.approx(0.1 + 1.0 + 1e-6 * 100 * 50)
    assert curves["from host"](100) == pytest.approx(0.001 + 1e-4)
    assert curves["from disk"](100) == pytest.approx(0.003 + 3e-4)
    assert curves_of({"recompute": None, "links": {}}, 1000.0) == {}


def request(blocks: list[int], length: int, output: int = 64) -> TraceRequest:
    return TraceRequest(timestamp=0, input_length=length, output_length=output, hash_ids=blocks)


def test_traces_are_scaled_down() -> None:
    """Prompts share as many blocks as in the trace, and are cut where they would be too long."""
    requests = [request([1, 2, 3], 1300), request([1, 2, 4], 1536), request(list(range(9)), 4608)]
    options = EngineOptions(scale=32, prompt_tokens_max=100)
    prompts = ScaledPrompts(options, requests[0].block_size, 256)
    one, other, cut = map(prompts.prompt, requests)
    assert prompts.cut_prompts == 1
    assert (len(one), len(other), len(cut)) == (16 + 16 + 8, 48, 100)
    assert one[:32] == other[:32]
    assert one[32:40] != other[32:40]
    with pytest.raises(InvalidRequest, match="scale is 1024"):
        ScaledPrompts(EngineOptions(scale=1024), requests[0].block_size, 256)


def test_a_trace_through_a_model(model: Any, served: DaemonProcess) -> None:
    """What requests share is restored, with the same answers, and both ways are timed."""
    requests = [request([1, 2, 3, n], 2000) for n in range(10, 16)]
    replay = EngineReplay(requests, model, "tiny", EngineOptions(scale=32))
    result = replay.run(served.address)
    tokens = 62  # three blocks of 16, and 14 of the fourth
    assert result["requests"] == 6
    assert result["input_tokens"] == 6 * tokens
    assert result["token_hit_ratio"] == pytest.approx(5 * 48 / (6 * tokens))
    assert result["token_hit_ratio_by_tier"] == {"host": result["token_hit_ratio"]}
    assert result["different_answers"] == 0
    assert result["requests_with_problems"] == 0
    assert result["wrong_bytes"] == 0
    assert result["ttft_p50_seconds"] > 0
    assert result["itl_alone_p50_seconds"] > 0
    assert dict(rows(result))["requests"] == "6, 0 of them cut short"
    assert result["requests_without_hits"] == 1
    assert 0 < result["store_share_without_hits"] < result["ttft_ratio_without_hits"]
    assert dict(rows(result))["  requests without a hit"].startswith("1, in ")


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["demo", "--report", "x.html"], "--report is of no use without --engine"),
        (["replay", "TRACE", "--scale", "4"], "--scale is of no use without --engine"),
    ],
)
def test_options_that_need_an_engine(
    arguments: list[str], fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of the engine without it are a usage error."""
    trace = tmp_path / "t.jsonl"
    trace.write_text(json.dumps({"timestamp": 0}))
    assert run([str(trace) if each == "TRACE" else each for each in arguments]) == 2
    assert fix in capsys.readouterr().err
