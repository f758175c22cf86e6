"""`kvstore explain`: why a request was served as it was, by its id or a block's key."""

from __future__ import annotations

from typing import Any

from kvstore.core.keys import chain_keys, pack_tokens
from kvstore.core.spec import root_digest, space_id


def key_of(space: Any, tokens: list[int], position: int) -> str:
    """The printed key of a block, computed as the daemon does."""
    root, size = root_digest(space_id(space.spec, space.tenant), "", ""), space.spec.symbol_bytes
    packed = pack_tokens(tokens)
    symbols = [packed[at : at + size] for at in range(0, len(packed), size)]
    return chain_keys(root[:16], symbols)[position].hex()


def test_by_request(kv: Any, engine: Any) -> None:
    """The plan, its reason and its outcome, for people and as JSON."""
    space = engine.fill(4)
    engine.lease(space, request_id="chat-1").release()
    text = kv("explain", "chat-1").out
    assert "chat-1" in text
    assert "load all" in text
    told = kv("explain", "chat-1", "--json").json
    assert told["plan"]["kind"] == "load_all"
    assert told["matched_tokens"] == told["plan"]["steps"][0]["token_count"] > 0
    assert told["outcome"]["measured_seconds"] is None


def test_with_measured_costs(kv: Any, engine: Any) -> None:
    """Once engine and copies are measured the numbers are there, and Status shows the models."""
    space = engine.fill(4, model="measured")  # one of its own: others' plans follow the costs, too
    for i in range(30):
        new, cached = 128 << i % 4, 1024 * (i % 5)
        space.report_step(1e-3 + 1e-5 * new, [(new, cached)], clock="device")
        space.report_transfer("host>hbm", 4096 << i % 6, 1e-4)
    with engine.lease(space, request_id="chat-2") as match:
        space.report_transfer("host>hbm", 4096, 2e-4, match=match)
    told = kv("explain", "chat-2", "--json").json
    assert told["links"]["host>hbm"]["bytes_per_second"] is not None
    assert told["alternatives"]
    assert "instead of" in kv("explain", "chat-2").out
    assert kv("explain", key_of(space, engine.prompt(4), 2), "--json").json == told
    costs = {cost["subject"]: cost for cost in kv("status", "--json").json["costs"]}
    assert costs["host>hbm"]["sample_count"] >= 30
    assert "8k tokens" in kv("status").out


def test_unknown_request(kv: Any, daemon: Any) -> None:
    """What is not known is one sentence and exit 1."""
    outcome = kv("explain", "nobody")
    assert outcome.code == 1
    assert "'nobody'" in outcome.sentence
    key = "0123456789abcdef0123456789abcdef"
    assert key in kv("explain", key).sentence
