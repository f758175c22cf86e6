"""`kvstore verify`: every stored byte against its checksum."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any


def flip(pool: Path, payload: bytes) -> None:
    """Changes one byte in the middle of the payload where it lies in the pool."""
    with open(pool / "pool-0.data", "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        at = data.find(payload)
        assert at >= 0
        data[at + len(payload) // 2] ^= 1


def test_sound_store(kv: Any, engine: Any) -> None:
    """Sound bytes are counted, exit 0."""
    engine.fill(4)
    result = kv("verify", "--json").json
    assert result["verified_blocks"] == 4
    assert result["verified_bytes"] == 4 * 4096
    assert (result["corrupt_blocks"], result["findings"]) == (0, [])
    outcome = kv("verify", "--tier", "host")
    assert outcome.code == 0
    assert "4 blocks (16 KiB) checked in" in outcome.out
    assert "all match" in outcome.out


def test_corrupt_block_is_exit_1(kv: Any, engine: Any, daemon: Any) -> None:
    """I11: a flipped bit is found and named; the block and what follows it are misses, exit 1."""
    space = engine.fill(4)
    flip(daemon.pool, bytes([9]) * 4096)  # the third of four
    outcome = kv("verify")
    assert outcome.code == 1
    assert "does not match its checksum: dropped" in outcome.out
    assert "1 corrupt" in outcome.out
    assert space.lookup(engine.prompt(4)).matched_tokens == 2 * 16
    assert kv("verify", "--json").json["verified_blocks"] == 2


def test_corrupt_block_in_json(kv: Any, engine: Any, daemon: Any) -> None:
    """Tools get the count, the findings and the same exit code."""
    engine.fill(1)
    flip(daemon.pool, bytes([7]) * 4096)
    outcome = kv("verify", "--json")
    assert outcome.code == 1
    assert outcome.json["corrupt_blocks"] == 1
    assert len(outcome.json["findings"]) == 1


def test_unknown_tier(kv: Any, daemon: Any) -> None:
    """A tier that is not there is named, with those that are."""
    outcome = kv("verify", "--tier", "disk")
    assert outcome.code == 1
    assert "'disk'" in outcome.sentence
    assert "host" in outcome.sentence
