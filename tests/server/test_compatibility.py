"""Clients and daemons of neighbouring versions: the protocol against the one last released.

proto/v1/released.binpb is what was released; `python proto/generate.py --freeze` writes it anew, at
a release and at no other time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor import FileDescriptor as File
from peers import ADMIN_METHODS, Engine, GrpcPeer

from kvstore.proto.v1 import kvstore_pb2 as pb

RELEASED = Path(__file__).parents[2] / "proto" / "v1" / "released.binpb"
DEPTH_MAX = 3


def released() -> File:
    """The released protocol, in a pool of its own."""
    files = descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    found: File = pool.FindFileByName(files.file[-1].name)
    return found


def messages(file: File) -> dict[str, Descriptor]:
    """Messages by full name, nested ones too."""
    found: dict[str, Descriptor] = {}
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        found[message.full_name] = message
        waiting += message.nested_types
    return found


def shape(field: FieldDescriptor) -> tuple[Any, ...]:
    """What a field's bytes mean; its name too, for JSON and for code."""
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof.name if field.containing_oneof else ""
    return (
        field.name, field.type, field.is_repeated, field.has_presence, oneof,
        kind.full_name if kind else "",
    )  # fmt: skip


def breaks(old: File, new: File) -> Iterator[str]:
    """What in `new` a peer that speaks `old` would read wrongly or miss."""
    now = messages(new)
    for name, message in messages(old).items():
        if name not in now:
            yield f"message {name} is gone"
            continue
        fields = now[name].fields_by_number
        for number, field in message.fields_by_number.items():
            if number not in fields:
                yield f"{name}.{field.name} = {number} is gone"
            elif shape(field) != shape(fields[number]):
                yield f"{name}.{field.name} = {number} is another: {shape(fields[number])}"
        yield from _enum_breaks(message.enum_types, now[name].enum_types)
    yield from _enum_breaks(old.enum_types_by_name.values(), new.enum_types_by_name.values())
    for name, service in old.services_by_name.items():
        methods = getattr(new.services_by_name.get(name), "methods_by_name", {})
        for method in service.methods:
            if _call(method) != _call(methods.get(method.name)):
                yield f"call {service.full_name}.{method.name} is gone or another"


def _enum_breaks(old: Any, new: Any) -> Iterator[str]:
    now = {enum.name: enum for enum in new}
    enum: EnumDescriptor
    for enum in old:
        values = getattr(now.get(enum.name), "values_by_number", {})
        for number, value in enum.values_by_number.items():
            if number not in values or values[number].name != value.name:
                yield f"{enum.full_name}.{value.name} = {number} is gone or another"


def _call(method: Any) -> tuple[Any, ...] | None:
    if method is None:
        return None
    proto = descriptor_pb2.MethodDescriptorProto()
    method.CopyToProto(proto)
    return proto.input_type, proto.output_type, proto.client_streaming, proto.server_streaming


def test_the_protocol_keeps_what_was_released() -> None:
    """No message, field, value or call of the last release is gone or means something else."""
    problems = list(breaks(released(), pb.DESCRIPTOR))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: f.message_type[0].field.pop(), "is gone"),
        (lambda f: setattr(f.message_type[0].field[0], "number", 999), "is gone"),
        (lambda f: setattr(f.message_type[0].field[0], "name", "other"), "is another"),
        (lambda f: f.message_type.pop(), "is gone"),
        (lambda f: f.service[0].method.pop(), "gone or another"),
        (lambda f: setattr(f.service[0].method[0], "server_streaming", True), "gone or another"),
    ],
)
def test_a_break_is_found(change: Any, told: str) -> None:
    """Each kind of break is noticed: the comparison compares."""
    files = descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes())
    change(files.file[-1])
    pool = descriptor_pool.DescriptorPool()
    try:
        for file in files.file:
            pool.Add(file)
        new = pool.FindFileByName(files.file[-1].name)
    except TypeError:
        return  # it is not even a protocol any more
    assert any(told in problem for problem in breaks(released(), new))


def filled(message: Any, depth: int = 0) -> Any:
    """A message with something in every field, to a bounded depth."""
    taken: set[str] = set()
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1:
            if oneof.name in taken:
                continue
            taken.add(oneof.name)
        if field.message_type is None:
            _fill_scalar(message, field)
        elif depth < DEPTH_MAX and not field.message_type.GetOptions().map_entry:
            child = getattr(message, field.name)
            filled(child.add() if field.is_repeated else child, depth + 1)
            if not field.is_repeated:
                child.SetInParent()
    return message


def _fill_scalar(message: Any, field: FieldDescriptor) -> None:
    kind = FieldDescriptor
    values = {kind.TYPE_STRING: "text", kind.TYPE_BYTES: b"bytes", kind.TYPE_BOOL: True}
    values |= {kind.TYPE_DOUBLE: 1.5, kind.TYPE_FLOAT: 1.5}
    value: Any = values.get(field.type, 3)
    if field.enum_type is not None:
        value = field.enum_type.values[-1].number
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def known(message: Any) -> Any:
    """The message without fields that its class does not know."""
    message.DiscardUnknownFields()
    return message


def test_messages_of_either_version_are_read_by_the_other() -> None:
    """Every released message, filled, means the same to this version; and the other way round.

    What the newer one adds is left aside by the older, and the rest arrives as it was.
    """
    now = messages(pb.DESCRIPTOR)
    count = 0
    for name, descriptor in messages(released()).items():
        if descriptor.GetOptions().map_entry:
            continue
        old_class = message_factory.GetMessageClass(descriptor)
        new_class = message_factory.GetMessageClass(now[name])
        old = filled(old_class())
        read_by_new = new_class.FromString(old.SerializeToString())
        assert old_class.FromString(read_by_new.SerializeToString()) == old, name
        assert known(new_class.FromString(old.SerializeToString())) == read_by_new, name
        new = filled(new_class())
        read_by_old = known(old_class.FromString(new.SerializeToString()))
        for field in descriptor.fields:
            if field.message_type is None:
                assert getattr(read_by_old, field.name) == getattr(new, field.name), name
        count += 1
    assert count > 40


class ReleasedPeer(GrpcPeer):
    """A client of the last release: it writes and reads only what was known then."""

    def method(self, method: str, shape: str = "unary_unary") -> Any:
        service = "Admin" if method in ADMIN_METHODS else "KVStore"
        call = released().services_by_name[service].methods_by_name[method]
        request = message_factory.GetMessageClass(call.input_type)
        answer = message_factory.GetMessageClass(call.output_type)
        return getattr(self.channel, shape)(
            f"/{call.containing_service.full_name}/{method}",
            request_serializer=lambda m: known(
                request.FromString(m.SerializeToString())
            ).SerializeToString(),
            response_deserializer=lambda raw: known(answer.FromString(raw)),
        )


def test_a_client_of_the_last_release_is_served(daemon: Any) -> None:
    """It attaches, puts, looks up, restores, releases and asks for the state, all as ever."""
    peer = ReleasedPeer(daemon)
    try:
        peer.open(1 << 20)
        engine = Engine(peer)
        tokens = list(range(64))
        assert set(engine.put(tokens)) == {pb.BLOCK_OUTCOME_STORED}
        match = engine.lookup(tokens)
        assert (match.matched_tokens, match.restore_tokens) == (64, 64)
        ranges = pb.RestoreRequest(lease_id=match.lease_id)
        assert list(peer.stream("Restore", ranges))
        peer.call("Release", pb.ReleaseRequest(lease_ids=[match.lease_id]))
        assert peer.call("Status", pb.StatusRequest()).state == "serving"
    finally:
        peer.close()
