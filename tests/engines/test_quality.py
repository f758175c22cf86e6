"""What formats cost in predictions: the figures' formulas, and the benchmark on a random model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tiny_llama import encode, tiny_llama

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

from kvstore.bench import quality  # noqa: E402
from kvstore.cli.bench import TARGETS, _show  # noqa: E402
from kvstore.core.errors import ConfigError  # noqa: E402
from kvstore.engines.logits import LogitErrors  # noqa: E402


def test_figures_follow_their_formulas() -> None:
    """Perplexity, divergence and errors of two positions are those computed by hand."""
    exact = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    found = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))
    errors = LogitErrors()
    errors.add(found[:1], exact[:1], [1])
    errors.add(found[1:], exact[1:], torch.tensor([0]))
    kl = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert errors.figures() == pytest.approx(
        {
            "logit_error_max": math.log(2),
            "logit_error_mean": 2 * math.log(2) / 6,
            "kl_mean": kl / 2,
            "kl_max": kl,
            "same_top_token_share": 0.5,
            "perplexity": math.exp(-(math.log(0.5) + math.log(0.1)) / 2),
            "perplexity_ratio": math.sqrt(0.25 / 0.5),
            "perplexity_ratio_error": math.sqrt(0.5) * math.log(2) / 2 / math.sqrt(2),
        },
        rel=1e-6,
    )


def test_equal_logits_have_no_errors() -> None:
    """A format without a loss has neither errors nor divergence, up to a constant in the logits."""
    exact = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    errors = LogitErrors()
    errors.add(exact, exact, [0, 1, 2, 3, 4])
    assert errors.figures()["logit_error_max"] == errors.figures()["kl_mean"] == 0.0
    shifted = LogitErrors()
    shifted.add(exact + 1.0, exact, [0, 1, 2, 3, 4])
    assert shifted.figures()["kl_mean"] < 1e-12
    assert shifted.perplexity == pytest.approx(errors.perplexity)


def test_every_format_of_a_random_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark ends with all figures: raw blocks are exact, fewer bits cost more."""
    model: Any = tiny_llama(head_dim=64, initializer_range=0.2)
    result = quality.run(quick=True, model=model, encode=encode)
    formats = result["formats"]
    assert set(TARGETS["quality"]) <= set(result)
    assert result["scored_tokens"] == result["windows"] * quality.QUICK_SCORED_TOKENS
    assert formats["exact"]["logit_error_max"] == 0.0
    assert formats["raw"]["logit_error_max"] < 1e-4
    order = ["raw", "bfloat16", "int8_th", "fp8_bh", "int4_kivi"]
    means = [formats[name]["logit_error_mean"] for name in order]
    assert means == sorted(means)
    assert formats["int8_th"]["block_size_ratio"] == pytest.approx(0.5 + 2 / 128)
    ratio = formats["int4_kivi"]["perplexity"] / formats["exact"]["perplexity"]
    assert result["int4_kivi_perplexity_ratio"] == pytest.approx(ratio)
    assert 0 < formats["int4_kivi"]["perplexity_ratio_error"] < 0.1
    _show("quality", result)
    assert "int4_kivi" in capsys.readouterr().out


def test_a_text_that_is_too_short() -> None:
    """Windows that would overlap are refused, since they would count a token twice."""
    with pytest.raises(ConfigError, match="the text has 10 tokens"):
        quality.run(quick=True, model=tiny_llama(head_dim=64), encode=lambda text: [1] * 10)
