"""docs/protocol.md equals the code."""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.core.lane import ADMIN_METHODS, HEADER_BYTES, METHODS, FrameKind
from kvstore.core.spec import KVSpec
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.frames import FRAMES_A_TURN, QUEUE_MAX_BYTES
from kvstore.server.grpc_server import CALLS_MAX, METADATA_BYTES, STREAMS_A_CONNECTION
from kvstore.server.peer import HANDSHAKE_MESSAGE_BYTES, HANDSHAKE_SECONDS

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]


def rpc_names() -> list[str]:
    services = pb.DESCRIPTOR.services_by_name
    return [method.name for name in ("KVStore", "Admin") for method in services[name].methods]


def test_every_call_has_a_row() -> None:
    """The table of calls has every RPC of the proto once, in the lane's order, and no other."""
    rows = [re.findall(r"`(\w+)`", cell)[0] for cell in first_cells(section("Calls"))]
    assert rows == list(METHODS)
    assert sorted(rows) == sorted(rpc_names())


def test_admin_methods_are_the_admin_service() -> None:
    """The role check covers exactly the calls of the Admin service."""
    admin = {method.name for method in pb.DESCRIPTOR.services_by_name["Admin"].methods}
    assert admin == ADMIN_METHODS


def test_every_spec_field_is_explained() -> None:
    """Each field of KVSpec has a meaning in the table, and the proto has the same fields."""
    cells = first_cells(section("Attach, and where bytes lie"))
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(KVSpec.__struct_fields__)
    assert named == {field.name for field in pb.KVSpec.DESCRIPTOR.fields}


def test_numbers_are_those_of_the_code() -> None:
    """Frame kinds and limits in the text are the code's."""
    assert ", ".join(f"{kind.value} {kind.name}" for kind in FrameKind) in TEXT
    for fact in (
        f"a {HEADER_BYTES}-byte header",
        f"at most {HANDSHAKE_MESSAGE_BYTES >> 10} KiB and within {HANDSHAKE_SECONDS:.0f} s",
        f"lets {QUEUE_MAX_BYTES >> 20} MiB pile",
        f"turns of {FRAMES_A_TURN} frames",
        f"{METADATA_BYTES >> 10} KiB of metadata",
        f"{STREAMS_A_CONNECTION} calls a connection",
    ):
        assert fact in " ".join(TEXT.split()), fact
    assert f"{CALLS_MAX} in all" in TEXT
