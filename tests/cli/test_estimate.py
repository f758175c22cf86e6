"""`kvstore estimate`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.cli.main import run

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def estimate(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> dict[str, Any]:
        assert run(["estimate", "--json", *arguments]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return call


def test_bytes_of_a_usual_model(estimate: Any) -> None:
    """32 layers, 8 heads of 128, 2 bytes: 128 KiB a token, 1 GiB at 8,192, 8 GiB for eight."""
    result = estimate(
        "--layers", "32", "--heads", "8", "--head-dim", "128", "--dtype", "float16",
        "--tokens", "8192", "--sequences", "8",
    )  # fmt: skip
    assert result["bytes_per_token"] == 131_072
    assert result["bytes_per_sequence"] == GIB
    assert result["total_bytes"] == 8 * GIB
    assert result["block_bytes"] == 2 * MIB
    assert "waste_ratio" not in result


def test_bytes_with_fewer_heads_and_smaller_values(estimate: Any) -> None:
    """2 heads of 1-byte values, 4,096 tokens: 64 MiB."""
    result = estimate("--heads", "2", "--dtype", "int8", "--tokens", "4096")
    assert result["bytes_per_sequence"] == 64 * MIB


def test_contiguous_reservation_wastes(estimate: Any) -> None:
    """2,048 live tokens of 8,192 reserved waste 75 %."""
    result = estimate("--tokens", "2048", "--reserved", "8192", "--sequences", "2")
    assert result["waste_ratio"] == 0.75
    assert result["reserved_bytes"] == 2 * GIB
    assert result["wasted_bytes"] == 3 * GIB // 2


def test_latents_count_once(estimate: Any) -> None:
    """With MLA one latent stands for K and V: 61 layers of 576 bf16 values a token."""
    assert estimate("--model", "deepseek-v3")["bytes_per_token"] == 61 * 576 * 2


def test_roofline(estimate: Any) -> None:
    """Decode attention reads more than it computes: 4 FLOP a byte with 4 query heads a KV head."""
    result = estimate("--tflops", "100", "--gbps", "1000")
    assert result["machine_balance_flops_per_byte"] == pytest.approx(100)
    assert result["decode_flops_per_byte"] == pytest.approx(4)
    assert result["decode_bound_by"] == "memory"
    assert "machine_balance_flops_per_byte" not in estimate()
    assert estimate("--device", "h100")["machine_balance_flops_per_byte"] == pytest.approx(
        989 / 3.35
    )


@pytest.mark.parametrize(
    "arguments",
    [["--tokens", "0"], ["--reserved", "1"], ["--tflops", "1"], ["--model", "gpt-9"],
     ["--dtype", "int3"], ["--layers", "-1"]],
)  # fmt: skip
def test_impossible_demands_are_usage_errors(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers that make no sense are exit 2 and one sentence."""
    assert run(["estimate", "--json", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_estimate_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json people get a table with units."""
    assert run(["estimate", "--reserved", "16384"]) == 0
    text = capsys.readouterr().out
    assert "131,072 B (128 KiB)" in text
    assert "50%" in text
