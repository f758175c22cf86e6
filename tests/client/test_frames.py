"""Frames out of a stream of bytes, however it is cut."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client.frames import FRAME_BYTES_MAX, FrameError, FrameReader
from kvstore.core.lane import FLAG_FDS, HEADER, FrameKind, pack_frame

FRAMES = st.lists(
    st.tuples(
        st.integers(0, 4), st.integers(0, 29), st.integers(0, 2**64 - 1), st.binary(max_size=90)
    ),
    max_size=8,
)


@given(frames=FRAMES, cuts=st.lists(st.integers(1, 40), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_frames_survive_any_cut_of_the_stream(frames, cuts):
    """What was packed comes out once, whole and in order, wherever the reads end."""
    stream = b"".join(
        pack_frame(kind, method, 0, call_id, payload) for kind, method, call_id, payload in frames
    )
    reader, found, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        for frame in reader.feed(memoryview(stream)[at : at + size], []):
            found.append((frame.kind, frame.method, frame.call_id, frame.payload))
        at, turn = at + size, turn + 1
    assert found == frames


def test_descriptors_go_to_the_frame_that_announced_them():
    """A frame without descriptors that arrives in the same read does not get another's."""
    plain = pack_frame(FrameKind.RESPONSE, 2, 0, 1, b"a")
    with_descriptors = pack_frame(FrameKind.RESPONSE, 1, FLAG_FDS, 2, b"b")
    frames = list(FrameReader().feed(memoryview(plain + with_descriptors), [7, 8]))
    assert [frame.descriptors for frame in frames] == [[], [7, 8]]


def test_descriptors_without_their_frame_are_closed():
    """A connection that ends in the middle of an Attach leaves no descriptor open."""
    reader = FrameReader()
    descriptor = os.dup(0)
    list(reader.feed(memoryview(b"\0" * 3), [descriptor]))
    reader.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_length_beyond_reason_is_refused(pieces):
    """I16: four bytes of garbage do not make the client set memory aside for them."""
    header = HEADER.pack(FRAME_BYTES_MAX + 1, 1, 0, 0, 1)
    reader = FrameReader()
    cut = 0 if pieces == 1 else 5
    assert list(reader.feed(memoryview(header[:cut]), [])) == []
    with pytest.raises(FrameError, match="a frame of"):
        list(reader.feed(memoryview(header[cut:]), []))


def test_announced_descriptors_must_be_there():
    """A frame that claims descriptors which did not come breaks the connection, not the client."""
    with pytest.raises(FrameError, match="without the descriptors"):
        list(FrameReader().feed(memoryview(pack_frame(1, 0, FLAG_FDS, 1, b"")), []))
