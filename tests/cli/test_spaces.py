"""`kvstore spaces`: what is listed, and how a space is told from another."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.cli.spaces import describe
from kvstore.client import KVSpec


def test_json_lists_every_space(kv: Any, engine: Any) -> None:
    """Each space has its id, spec, tenant, epoch, blocks, bytes by tier and attached engines."""
    engine.fill(4, tenant="chat", model="listed")
    found = [s for s in kv("spaces", "--json").json["spaces"] if s["spec"]["model"] == "listed"]
    assert len(found) == 1
    space = found[0]
    assert len(bytes.fromhex(space["space_id"])) == 32
    assert (space["tenant"], space["epoch"], space["block_count"]) == ("chat", 0, 4)
    assert space["used_bytes"] == {"host": 4 * 4096}
    assert space["attachment_count"] == 1
    assert space["spec"]["block_size"] == 16


def test_table_is_sorted_by_bytes(kv: Any, engine: Any) -> None:
    """The fullest space comes first; ids are cut to what other verbs accept."""
    engine.fill(2, model="smaller")
    engine.fill(5, model="larger")
    outcome = kv("spaces")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert "larger @ r1" in lines[1]
    assert "smaller @ r1" in lines[2]
    assert "16 tokens, 1x1x64 float16, 4 KiB" in lines[1]
    shown = lines[1].split()[0]
    assert kv("clear", "--space", shown, "--yes").out == "5 blocks dropped from 1 space\n"


def test_no_spaces_is_said(kv: Any, serve: Any) -> None:
    """A fresh daemon has none: a person reads so, a tool gets an empty list."""
    daemon = serve().start()
    assert "no spaces" in kv("spaces", "--socket", daemon.socket).out
    assert kv("spaces", "--json", "--socket", daemon.socket).json == {"spaces": []}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "16 tokens, 32x8x128 bfloat16, 2 MiB"),
        ({"shard_count": 2}, "2 shards of 2 MiB"),
        ({"layer_first": 16, "pp_size": 2}, "layers from 16"),
        ({"pp_size": 2}, "layers from 0"),
        ({"layout": "LKHND"}, "LKHND"),
        ({"layout": "cpu-avx512", "block_bytes": 1 << 20}, "1 MiB, cpu-avx512"),
        ({"kv_format": "int8_th", "block_bytes": 1 << 20}, "int8_th"),
        ({"key_mode": "external", "hash_algorithm": "sha256_cbor"}, "sha256_cbor"),
        ({"attention": {"sliding_window": "4096"}}, "sliding_window=4096"),
        ({"group": "full"}, "full"),
    ],
)
def test_description_tells_specs_apart(changes: dict[str, Any], words: str) -> None:
    """Whatever makes two spaces of one model differ is to be read, and nothing ordinary is."""
    usual = {
        "model": "m", "revision": "r", "num_layers": 32, "num_kv_heads": 8, "head_dim": 128,
        "dtype": "bfloat16", "block_size": 16,
    }  # fmt: skip
    spec = KVSpec(**{**usual, **changes})
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    assert words in describe(fields)
