"""What a restored prompt is compared with: prefill alone, greedy decoding, and a witness."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_llama import tiny_llama

from kvstore.client import KVSpec
from kvstore.engines import smollm2
from kvstore.engines.generating import decode, prefill_alone
from kvstore.engines.transformers import block_reader, spec_of
from kvstore.replay.witness import Witness

IDS = list(range(40))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def test_decoding_is_greedy(model: Any) -> None:
    """Tokens are those of the model's own greedy generation; a stop token ends them."""
    answer = decode(model, prefill_alone(model, IDS), 12)
    own = model.generate(
        torch.tensor([IDS]), attention_mask=torch.ones(1, len(IDS)), max_new_tokens=12,
        do_sample=False, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    assert answer.tokens == own[0, len(IDS) :].tolist()
    assert len(answer.step_seconds) == 11
    short = decode(model, prefill_alone(model, IDS), 12, stop=[answer.tokens[3]])
    assert short.tokens == answer.tokens[: answer.tokens.index(answer.tokens[3]) + 1]


def test_the_witness_sees_other_bytes(model: Any) -> None:
    """A block that differs in one value is found, and no other; unknown blocks are none."""
    spec: KVSpec = spec_of(model, name="m", block_size=8)
    witness, cache = Witness(spec), prefill_alone(model, IDS).cache
    witness.stored(IDS, cache)
    assert witness.wrong_bytes(IDS, cache) == 0
    assert len(block_reader(cache, spec)(0)) == spec.block_bytes
    cache.layers[1].values[0, 1, 20, 3] += 1
    assert witness.wrong_bytes(IDS, cache) == spec.block_bytes
    assert witness.wrong_bytes([99, *IDS[1:]], cache) == 0


def test_a_model_that_is_not_there(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the converted model, the error says how to get it."""
    monkeypatch.setenv(smollm2.VARIABLE, str(tmp_path))
    assert not smollm2.is_there()
    with pytest.raises(smollm2.ConfigError, match="run: make smollm2"):
        smollm2.load()
