"""Fixtures: a served store, and peers of it over each transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from peers import DirectPeer, Engine, GrpcPeer, LanePeer
from served import ServedStore, config_for_tests, serving


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ServedStore]:
    with serving(tmp_path, config_for_tests()) as running:
        yield running


@pytest.fixture
def lane(daemon: ServedStore) -> Iterator[LanePeer]:
    """A raw lane connection without a session yet."""
    peer = LanePeer(daemon.lane_path)
    yield peer
    peer.close()


@pytest.fixture(params=["lane", "grpc", "direct"])
def peer(request: pytest.FixtureRequest, daemon: ServedStore) -> Iterator[Any]:
    """A peer with an open session, over each transport in turn."""
    makers: dict[str, Callable[[], Any]] = {
        "lane": lambda: LanePeer(daemon.lane_path),
        "grpc": lambda: GrpcPeer(daemon),
        "direct": lambda: DirectPeer(daemon),
    }
    made = makers[request.param]()
    made.open()
    yield made
    made.close()


@pytest.fixture
def engine(peer: Any) -> Engine:
    """An attached peer, over each transport in turn."""
    return Engine(peer)
