"""Fuzzing of everything that reads bytes from the wire or a medium, one decoder at a time."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import xxhash
from fuzzing import Corpus, try_decoder
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from kvstore.client.frames import FrameError, FrameReader
from kvstore.client.located import unpack
from kvstore.client.wire import plan_of
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.core.key_file import DiskKey, parse_keys
from kvstore.core.lane import FrameKind, pack_frame
from kvstore.core.slots import decode_slots, encode_slots
from kvstore.core.spec import KVSpec
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.store.costs import CostBook
from kvstore.store.record import KnownSpace, read_spaces
from kvstore.tiers import epochs, record
from kvstore.tiers.base import BlockHeader
from kvstore.tiers.disk import directory, index, layout
from kvstore.tiers.disk.entries import parse_record, seal_record
from kvstore.tiers.disk.vault import Vault
from kvstore.tiers.host import layout as pool_layout

STORE, SERIAL, SLOT, SEED = bytes(range(16)), 7, 3, 99
HEADER = BlockHeader(
    space=b"s" * 32, root=b"r" * 32, key=b"k" * 16, parent_key=b"p" * 16, position=4, shard=0,
    epoch=2, length=12_000, symbol=bytes(64),
)  # fmt: skip
RECORD = record.SlotRecord(HEADER, b"c" * 16, 77)
VAULT = Vault([DiskKey("k", b"k" * 32)])
SECRET = RECORD._replace(seal=VAULT.sealer(b"").finish())
GEOMETRY = layout.Geometry(12288, 4096, 20, 1 << 20)
SPEC = KVSpec(
    model="m", revision="r", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32",
    block_size=4,
)  # fmt: skip


class Decoder(NamedTuple):
    """One reader of bytes: what it may raise, and inputs that it takes.

    `sealed(raw)` puts a checksum right again, so that mutants get past it. `only` is what may
    come out of a mutant that was not sealed again: nothing else than what was written.
    """

    decode: Callable[[bytes], Any]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...] = ()
    sealed: Callable[[bytes], bytes] | None = None
    only: tuple[Any, ...] = ()


def sealed_page(raw: bytes, seed: int = 0) -> bytes:
    body = raw[:-16]
    return body + xxhash.xxh3_128_digest(body, seed)


def sealed_header(raw: bytes) -> bytes:
    return sealed_page(raw, int.from_bytes(STORE[:8], "little"))


def sealed_value(raw: bytes) -> bytes:
    key = index.pack_key(SERIAL, SLOT)
    return raw[:-8] + xxhash.xxh3_64_digest(key + raw[:-8])


def sealed_slot(raw: bytes) -> bytes:
    """A slot header's checksum covers its body and the symbol as long as the body says."""
    if len(raw) < 176:
        return raw
    (symbol,) = struct.unpack_from("<I", raw, 16 + 8 + 8 + 8 + 4 + 4 + 8)
    body = raw[16 : 176 + symbol]
    return record.VALID + struct.pack("<Q", xxhash.xxh3_64_intdigest(body, SEED)) + raw[16:]


def sealed_pool(raw: bytes) -> bytes:
    body = raw[: pool_layout._SUPERBLOCK.size]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + raw[len(body) + 8 :]


def table_bytes() -> bytes:
    marks = {bytes([i]) * 32: epochs.Mark(i, 2 * i) for i in range(3)}
    return epochs._pack(epochs._Table(9, False, marks, STORE))


def map_bytes() -> bytes:
    return bytes(4096) + b"".join(
        struct.pack("<IIQQQ", 0x4B4E4843, i, 4096, 192, i) for i in (0, 1)
    )


def costs_of(raw: bytes) -> Any:
    costs = CostBook()
    costs.load(raw)
    return costs.dump()


def frames_of(raw: bytes) -> Any:
    reader = FrameReader()
    with contextlib.closing(reader):
        half = len(raw) // 2
        return [*reader.feed(memoryview(raw)[:half], []), *reader.feed(memoryview(raw)[half:], [])]


def slots_of(raw: bytes) -> Any:
    message = pb.SlotRuns.FromString(raw)
    counts = memoryview(message.counts)
    if len(counts) % 4 == 0 and sum(counts.cast("I")) > 1 << 20:
        return None  # no answer is so long; the daemon that a client trusts has a limit
    unpack(message)
    return decode_slots(message.places, message.generations, message.counts, 1)


def packed_slots() -> bytes:
    places, generations, counts = encode_slots(np.arange(9), np.arange(9, dtype=np.uint64), 1)
    return pb.SlotRuns(places=places, generations=generations, counts=counts).SerializeToString()


def plan_bytes() -> bytes:
    step = pb.PlanStep(first_token=0, token_count=64, source="host")
    return pb.Plan(kind="load_all", steps=[step]).SerializeToString()


DECODERS = {
    "segment superblock": Decoder(
        layout.parse_superblock,
        (layout.pack_superblock(layout.Superblock(STORE, SERIAL, 1 << 16, GEOMETRY)),),
        sealed=sealed_page, only=(layout.Superblock(STORE, SERIAL, 1 << 16, GEOMETRY), None),
    ),
    "segment cell": Decoder(
        lambda raw: layout.parse_cell(raw, STORE, SERIAL), (layout.pack_cell(STORE, SERIAL, 5),),
        sealed=sealed_page, only=(5, 0),
    ),
    "block header on disk": Decoder(
        lambda raw: layout.parse_header(raw, STORE, SERIAL, SLOT),
        (layout.pack_header(RECORD, STORE, SERIAL, SLOT, 4096),),
        sealed=sealed_header, only=(RECORD, None),
    ),
    "encrypted header on disk": Decoder(
        lambda raw: layout.parse_header(raw, STORE, SERIAL, SLOT, VAULT),
        (layout.pack_header(SECRET, STORE, SERIAL, SLOT, 4096, VAULT),),
        sealed=sealed_header, only=(SECRET, None),
    ),
    "encrypted record": Decoder(
        lambda raw: parse_record(raw, VAULT, b"p"), (seal_record(SECRET, VAULT, b"p"),),
        only=(SECRET, None),
    ),
    "file of keys": Decoder(
        lambda raw: [key.secret for key in parse_keys(raw, "f")],
        (b"a " + b"0f" * 32 + b"\n# c\nb " + b"A" * 43 + b"=\n",), (ConfigError,),
    ),
    "entry of the index": Decoder(
        lambda raw: index.parse_value(index.pack_key(SERIAL, SLOT), raw),
        (index.pack_value(index.pack_key(SERIAL, SLOT), RECORD),),
        sealed=sealed_value, only=(RECORD, None),
    ),
    "slot header in a pool": Decoder(
        lambda raw: record.parse(raw, 4096, SEED), (record.pack(*RECORD[:3], 4096, SEED),),
        sealed=sealed_slot, only=(RECORD, None),
    ),
    "superblock of a pool": Decoder(
        pool_layout.parse_superblock,
        (pool_layout.pack_superblock(pool_layout.Superblock(16, 1 << 24, "b", bytes(32)), STORE),),
        sealed=sealed_pool,
    ),
    "map of a pool": Decoder(
        lambda raw: pool_layout.read_chunks(memoryview(raw.ljust(4096 + 64, b"\0")), 2),
        (map_bytes(),),
    ),
    "generations of a pool": Decoder(
        lambda raw: pool_layout.read_generation_reservation(memoryview(raw.ljust(4096, b"\0"))),
        (bytes(2200),),
    ),
    "epochs": Decoder(epochs._parse, (table_bytes(),), sealed=sealed_page),
    "saved costs": Decoder(costs_of, (b'{"version":1,"models":[]}', b"[" * 5000, b"1e999")),
    "lane frames": Decoder(
        frames_of, (pack_frame(FrameKind.RESPONSE, 2, 0, 5, b"x" * 40) * 3,), (FrameError,)
    ),
    "slots of an answer": Decoder(slots_of, (packed_slots(),), (DecodeError, KVStoreError)),
    "plan of an answer": Decoder(
        lambda raw: plan_of(pb.Plan.FromString(raw)), (plan_bytes(),), (DecodeError, KVStoreError)
    ),
}  # fmt: skip


def cases(few: int, many: int) -> Any:
    """So many in `make test`, in `make test-long` and in `make soak`."""
    long, soak = pytest.mark.long, pytest.mark.soak
    slow = pytest.mark.timeout(3600)
    return pytest.mark.parametrize(
        "count",
        [few, pytest.param(many, marks=long), pytest.param(20 * many, marks=[long, soak, slow])],
    )


@cases(200, 4000)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, count: int) -> None:
    """I11, I19: mutated bytes of a medium or of an answer are read as nothing or refused, also
    where their checksum is right; where it is not, nothing but what was written comes out."""
    decoder, rng = DECODERS[name], random.Random(name)
    corpus = Corpus(decoder.seeds)
    for seed in decoder.seeds:
        assert not try_seed(decoder, seed), name

    def decode(raw: bytes) -> Any:
        found = decoder.decode(raw)
        assert not decoder.only or found in decoder.only, "what was never written came out"
        return found

    assert not try_decoder(rng, corpus, decode, decoder.refusals, count // 2)[:3]
    sealed = decoder.sealed
    if sealed is not None:
        again = lambda raw: decoder.decode(sealed(raw))  # noqa: E731
        assert not try_decoder(rng, corpus, again, decoder.refusals, count // 2)[:3]


def try_seed(decoder: Decoder, seed: bytes) -> str:
    try:
        decoder.decode(seed)
    except decoder.refusals:
        return ""
    except Exception as error:
        return repr(error)
    return ""


# ---- Files ----

FORMAT = b'{"version":1,"store_id":"%s","unit_bytes":65536}' % STORE.hex().encode()
FILES: dict[str, tuple[str, Callable[[Path], Any], tuple[bytes, ...]]] = {
    "format of a disk tier": (
        directory.FORMAT, directory.read_format,
        (FORMAT, b"[" * 4000, FORMAT.replace(b"65536", b"1e999"), FORMAT.replace(b"1,", b"[],", 1)),
    ),
    "known spaces": (
        "spaces.json", lambda path: read_spaces(path / "spaces.json"),
        (msgspec.json.encode([KnownSpace(tenant="t", spec=SPEC)]), b"[" * 5000),
    ),
}  # fmt: skip


@cases(100, 2000)
@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str, count: int) -> None:
    """I13, I19: a small file that was damaged is read as nothing, or refused with a sentence."""
    file, read, seeds = FILES[name]
    rng, corpus = random.Random(name), Corpus(seeds)

    def decode(raw: bytes) -> Any:
        (tmp_path / file).write_bytes(raw)
        return read(tmp_path)

    for seed in seeds:
        assert not try_seed(Decoder(decode, (), (KVStoreError,)), seed), seed[:60]
    assert not try_decoder(rng, corpus, decode, (KVStoreError,), count)[:3]


# ---- Messages ----


def filled(kind: Descriptor, depth: int = 0) -> Any:
    """A message with every field set, to a depth of three."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if field.message_type is not None:
            if depth < 3 and not field.message_type.GetOptions().map_entry:
                inner = filled(field.message_type, depth + 1)
                target = getattr(message, field.name)
                target.add().CopyFrom(inner) if field.is_repeated else target.CopyFrom(inner)
            continue
        value = b"\x01" * 16 if field.type == field.TYPE_BYTES else "x"
        if field.type not in (field.TYPE_BYTES, field.TYPE_STRING):
            value = True if field.type == field.TYPE_BOOL else 1
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


@cases(10, 400)
def test_messages(count: int) -> None:
    """I19: bytes of any message type are a message, which can be sent on, or refused."""
    kinds = pb.DESCRIPTOR.message_types_by_name
    assert len(kinds) > 80
    for name, kind in kinds.items():
        if kind.GetOptions().map_entry:
            continue
        made, rng = GetMessageClass(kind), random.Random(name)
        again = lambda raw, made=made: made.FromString(raw).SerializeToString()  # noqa: E731
        corpus = Corpus([filled(kind).SerializeToString(), b""])
        assert not try_decoder(rng, corpus, again, (DecodeError,), count)[:3], name
