"""Identity: what makes two blocks the same, and golden values that never change."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidRequest, SpecError
from kvstore.core.keys import (
    block_key,
    chain_keys,
    hash_chain,
    pack_tokens,
    token_chain,
)
from kvstore.core.spec import KVSpec, root_digest, space_id

BASE: dict[str, Any] = {
    "model": "meta/llama", "revision": "abc", "num_layers": 32, "num_kv_heads": 8,
    "head_dim": 128, "dtype": "bfloat16", "block_size": 16,
}  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {"model": "meta/llam"}, {"revision": "abd"}, {"num_layers": 31}, {"layer_first": 1},
    {"num_kv_heads": 4}, {"head_dim": 64}, {"dtype": "float16"}, {"block_size": 32},
    {"kv_factor": 1}, {"layout": "LKHND"}, {"attention": {"rope": "1"}},
    {"attention": {"rope": "2"}}, {"attention": {"rope": "1", "window": ""}}, {"shard_count": 2},
    {"pp_size": 2}, {"group": "full"}, {"kv_format": "int8_th", "block_bytes": 2097152},
    {"key_mode": "external", "hash_algorithm": "sha256_cbor"},
    {"layout": "opaque/flash", "block_bytes": 2097152},
]  # fmt: skip

GOLDEN = {
    "space": "e256b51ef652ea2867e288ea68d98ff46f94651f8cb093207fbae6b677eeac43",
    "root": "21faffa864464edce8e7780f7252969b43d5183c72fe5e4ddf2c0e87993dc6c9",
    "root_lora": "7b2b7e98ee83b7cde96fdc79cc7d87c9c3e559949f8d7d7aa3e67a5dfc92372c",
    "first": "a4f157756cda699ff40b277eef018758",
    "second": "d955610c86e57e8bd99e3a71aeb7b18d",
    "external": "ea8a10c1693872bcfbef65f74f695a2c1c00da05d27b96b2144d8daff05db2ab",
}


def spec(**changes: Any) -> KVSpec:
    return KVSpec(**{**BASE, **changes})


def test_every_field_tells_spaces_apart() -> None:
    """I2: specs that differ in any field, or in the tenant, are different spaces."""
    ids = {space_id(spec(**change), "default") for change in [{}, *CHANGES]}
    assert len(ids) == len(CHANGES) + 1
    assert space_id(spec(), "a") != space_id(spec(), "b")


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_text_does_not_slip_from_field_to_field(a: str, b: str, c: str, d: str) -> None:
    """I2: fields are length-prefixed, so no two pairs of texts have one encoding."""
    one, other = spec(model=a or "m", revision=b or "r"), spec(model=c or "m", revision=d or "r")
    same = (one.model, one.revision) == (other.model, other.revision)
    assert (one.encode() == other.encode()) == same
    space = bytes(32)
    assert (root_digest(space, a, b) == root_digest(space, c, d)) == ((a, b) == (c, d))


def test_adapter_and_salt_do_not_swap() -> None:
    """I2: the same text as adapter or as cache_salt is another root; concatenations too."""
    pairs = list(itertools.product(("", "x", "xx"), repeat=2))
    assert len({root_digest(bytes(32), a, b) for a, b in pairs}) == len(pairs)


def test_attention_is_a_set_of_pairs() -> None:
    """I2: the order in which attention entries were given says nothing."""
    one = spec(attention={"a": "1", "b": "2"})
    other = spec(attention={"b": "2", "a": "1"})
    assert one.encode() == other.encode()


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), max_size=5))
def test_keys_name_whole_chains(blocks: list[list[int]]) -> None:
    """Keys chain: each depends on all blocks before it, and on nothing after."""
    tokens = [token for block in blocks for token in block]
    chain = token_chain(pack_tokens(tokens), 4)
    symbols = [s.symbols[i : i + 16] for s in chain.segments for i in range(0, len(s.symbols), 16)]
    keys = chain_keys(bytes(16), symbols)
    assert len(set(keys)) == len(blocks)
    assert keys == [chain_keys(bytes(16), symbols[: i + 1])[-1] for i in range(len(symbols))]


def test_golden_vectors() -> None:
    """Digests are the same on every machine and Python: what is on disk stays readable."""
    assert space_id(spec(), "default").hex() == GOLDEN["space"]
    root = root_digest(space_id(spec(), "default"), "", "")
    assert root.hex() == GOLDEN["root"]
    assert root_digest(space_id(spec(), "default"), "lora", "salt").hex() == GOLDEN["root_lora"]
    first = block_key(root[:16], pack_tokens(range(16)))
    assert first.hex() == GOLDEN["first"]
    assert block_key(first, pack_tokens(range(16, 32))).hex() == GOLDEN["second"]
    external = spec(key_mode="external", hash_algorithm="sha256_cbor")
    assert space_id(external, "t").hex() == GOLDEN["external"]


def test_byte_formula() -> None:
    """32 layers of 8 heads of 128 in 2 bytes are 131,072 bytes a token, 1 GiB at 8,192."""
    assert spec().bytes_per_token == 131_072
    assert spec().block_bytes * 8_192 // 16 == 1 << 30
    assert spec(num_kv_heads=2, dtype="int8").bytes_per_token * 4_096 == 64 << 20


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": ""}, "model"), ({"revision": ""}, "revision"), ({"num_layers": 0}, "num_layers"),
        ({"block_size": 5000}, "block_size"), ({"layer_first": -1}, "layer_first"),
        ({"kv_factor": 3}, "kv_factor"), ({"kv_format": "fp3"}, "kv_format"),
        ({"dtype": "float7"}, "dtype"), ({"block_bytes": 17}, "block_bytes"),
        ({"layout": "mine"}, "block_bytes"), ({"key_mode": "md5"}, "key_mode"),
        ({"key_mode": "external"}, "hash_algorithm"),
        ({"key_mode": "external", "hash_algorithm": "builtin-random"}, "hash_algorithm"),
        ({"shard_count": 0}, "shard_count"), ({"num_layers": 2**31}, "num_layers"),
    ],
)  # fmt: skip
def test_wrong_specs_name_their_field(change: dict[str, Any], field: str) -> None:
    """A spec that cannot be is refused with the field's name."""
    with pytest.raises(SpecError, match=field):
        spec(**change)


def test_random_seeds_are_refused_with_the_fix() -> None:
    """Hashes seeded at random in every process could never match: the message says what to set."""
    with pytest.raises(SpecError, match="PYTHONHASHSEED"):
        spec(key_mode="external", hash_algorithm="xxhash(random seed)")


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], [[1, 2]], ["x"]])
def test_token_ids_out_of_range(bad: Any) -> None:
    """Ids that are no uint32 are refused, never wrapped round into other tokens."""
    with pytest.raises(InvalidRequest, match="token_ids"):
        pack_tokens(bad)


def test_partial_blocks_are_left_out() -> None:
    """Only full blocks are blocks; the empty prompt has none."""
    assert token_chain(b"", 16).block_count == 0
    assert token_chain(pack_tokens(range(15)), 16).block_count == 0
    assert token_chain(pack_tokens(range(33)), 16).block_count == 2


def test_extra_digests_are_part_of_the_symbol() -> None:
    """I1: a block with other content beside its tokens is another block; neighbours are not."""
    plain = token_chain(pack_tokens(range(48)), 16)
    image = token_chain(pack_tokens(range(48)), 16, {1: b"i" * 32})
    assert [s.width for s in image.segments] == [64, 96, 64]
    assert plain.block_count == image.block_count == 3
    assert image.segments[0].symbols == plain.segments[0].symbols[:64]
    with pytest.raises(InvalidRequest, match="32-byte"):
        token_chain(pack_tokens(range(48)), 16, {1: b"short"})


def test_external_hashes() -> None:
    """Engines' own hashes are symbols of 16 to 32 bytes; other lengths are refused."""
    assert hash_chain(bytes(96), 32).block_count == 3
    for length, total in ((15, 30), (33, 66), (32, 33)):
        with pytest.raises(InvalidRequest, match="hash"):
            hash_chain(bytes(total), length)


def test_specs_are_values() -> None:
    """A spec cannot be changed, and one built from its own fields is equal."""
    one = spec(attention={"rope": "1"})
    with pytest.raises(AttributeError):
        one.model = "other"  # type: ignore[misc]
    assert KVSpec(**msgspec.structs.asdict(one)) == one
    assert KVSpec(**msgspec.structs.asdict(one)).encode() == one.encode()
