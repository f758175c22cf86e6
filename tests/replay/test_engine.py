"""The replay's engine: what counts as a hit, as wrong, as re-adopted; the board between clients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.core.errors import LeaseLost, StoreUnavailable
from kvstore.core.plan import PlanStep
from kvstore.replay.board import Board, Progress
from kvstore.replay.engine import AttachedSpace, Seen, TraceEngine
from kvstore.replay.formats import TraceRequest
from kvstore.replay.payload import PromptMaker, prompt_keys
from kvstore.replay.tally import Tally, report

SIZE = 16


class Match(SimpleNamespace):
    def __enter__(self) -> Match:
        return self

    def __exit__(self, *error: object) -> None:
        self.space.open_matches -= 1


class FakeSpace:
    """A space in a dictionary, with faults to order."""

    space_id, epoch, block_bytes = bytes(32), 0, 256

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.open_matches = 0
        self.fault: Exception | None = None
        self.capacity = 10**9
        self.calls: list[tuple[Any, ...]] = []

    def lookup(self, tokens: np.ndarray, *, request_id: str, hints: Any) -> Match:
        if self.fault:
            raise self.fault
        self.calls.append(("lookup", request_id, len(tokens), hints and hints.session))
        keys = prompt_keys(self.space_id, tokens, SIZE)
        found = next((i for i, k in enumerate(keys) if k not in self.blocks), len(keys))
        self.open_matches += 1
        count = found * SIZE
        steps = (PlanStep(0, count, "host"),) if count else ()
        return Match(
            space=self, keys=keys, matched_tokens=count, restore_tokens=count,
            plan=SimpleNamespace(steps=steps),
        )  # fmt: skip

    def restore_into(self, match: Match, buffers: np.ndarray) -> None:
        for row, key in zip(buffers, match.keys, strict=False):
            row[:] = np.frombuffer(self.blocks[key], dtype=np.uint8)

    def finish_request(self, request_id: str, output_tokens: int) -> None:
        assert not self.open_matches, "a request ended before its leases did"
        self.calls.append(("finish", request_id, output_tokens))

    def put(
        self, tokens: np.ndarray, blocks: np.ndarray, first_block: int = 0, *, request_id: str
    ) -> Any:
        self.calls.append(("put", request_id, len(tokens)))
        keys = prompt_keys(self.space_id, tokens, SIZE)[first_block:]
        room = max(self.capacity - len(self.blocks), 0)
        for key, row in zip(keys[:room], blocks, strict=False):
            self.blocks[key] = row.tobytes()
        stored = min(room, len(keys))
        return SimpleNamespace(stored=stored, present=0, pending=0, rejected=len(keys) - stored)


@pytest.fixture
def space() -> FakeSpace:
    return FakeSpace()


@pytest.fixture
def board(tmp_path: Path) -> Any:
    board = Board(tmp_path / "board", clients=2, id_count=100, create=True)
    yield board
    board.close()


@pytest.fixture
def engine() -> TraceEngine:
    return TraceEngine(PromptMaker(SIZE), SIZE, Tally())


def serve(
    engine: TraceEngine, space: FakeSpace, board: Board, *ids: int, length: int = 0,
    session: str = "",
) -> Tally:  # fmt: skip
    request = TraceRequest(
        timestamp=0, input_length=length or len(ids) * SIZE, output_length=77, hash_ids=list(ids),
        block_size=SIZE, session=session,
    )  # fmt: skip
    attached = AttachedSpace(space, space.space_id, space.epoch, space.block_bytes)
    engine.serve(attached, request, Seen(board, np.array(ids)))
    return engine.tally


def test_hits_are_verified_prefix_tokens(
    engine: TraceEngine, space: FakeSpace, board: Board
) -> None:
    """A second request hits exactly what it shares with the first, by tier; the tail is stored."""
    serve(engine, space, board, 1, 2, 3)
    tally = serve(engine, space, board, 1, 2, 4, 5, length=4 * SIZE - 1)
    assert (tally.hit_tokens, tally.hit_tokens_by_tier) == (32, {"host": 32})
    assert (tally.stored_blocks, tally.restored_blocks, tally.wrong_bytes) == (4, 2, 0)
    assert tally.input_tokens == 48 + 63
    assert space.open_matches == 0


def test_the_store_hears_of_whole_requests(
    engine: TraceEngine, space: FakeSpace, board: Board
) -> None:
    """Lookup, puts and end of a request name it; its whole length, session and output are told."""
    serve(engine, space, board, 1, 2, 3, length=3 * SIZE - 5, session="s")
    serve(engine, space, board, 1, 2)
    assert space.calls == [
        ("lookup", "1", 3 * SIZE - 5, "s"), ("put", "1", 2 * SIZE), ("finish", "1", 77),
        ("lookup", "2", 2 * SIZE, None), ("finish", "2", 77),
    ]  # fmt: skip


def test_wrong_bytes_are_no_hits(engine: TraceEngine, space: FakeSpace, board: Board) -> None:
    """A block with a wrong byte counts, and from it on nothing is a hit."""
    serve(engine, space, board, 1, 2, 3)
    key = list(space.blocks)[1]
    space.blocks[key] = b"?" + space.blocks[key][1:]
    tally = serve(engine, space, board, 1, 2, 3)
    assert (tally.wrong_bytes, tally.wrong_blocks, tally.hit_tokens) == (1, 1, 16)


def test_readopted_hits(engine: TraceEngine, space: FakeSpace, board: Board) -> None:
    """Only blocks that nobody stored since the restart count as re-adopted when hit (I10)."""
    serve(engine, space, board, 1, 2)
    assert serve(engine, space, board, 1, 2).readopted_hit_tokens == 0
    board.next_phase()
    tally = serve(engine, space, board, 1, 2, 3)
    assert tally.readopted_hit_tokens == 32
    assert serve(engine, space, board, 1, 2, 3).readopted_hit_tokens == 64


def test_outage_is_counted(engine: TraceEngine, space: FakeSpace, board: Board) -> None:
    """With the daemon away a request is a miss, counted, and the caller hears of it."""
    space.fault = StoreUnavailable("gone")
    with pytest.raises(StoreUnavailable):
        serve(engine, space, board, 1, 2)
    assert (engine.tally.unavailable, engine.tally.requests) == (1, 1)
    assert engine.tally.input_tokens == 32


def test_lost_lease_is_a_miss(
    engine: TraceEngine, space: FakeSpace, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease lost while restoring costs the hits of that request and nothing else (I6)."""

    def lost(match: Match, buffers: Any) -> None:
        raise LeaseLost("expired")

    serve(engine, space, board, 1, 2)
    monkeypatch.setattr(space, "restore_into", lost)
    tally = serve(engine, space, board, 1, 2)
    assert (tally.lost_leases, tally.hit_tokens, tally.wrong_bytes) == (1, 0, 0)


def test_full_store_rejects(engine: TraceEngine, space: FakeSpace, board: Board) -> None:
    """Blocks that find no room are counted and the run goes on."""
    space.capacity = 2
    tally = serve(engine, space, board, 1, 2, 3)
    assert (tally.stored_blocks, tally.rejected_blocks) == (2, 1)


def test_board_is_shared(tmp_path: Path) -> None:
    """Two processes' views of a board hand every number out once and add their rows up."""
    one = Board(tmp_path / "b", clients=2, id_count=3, create=True)
    two = Board(tmp_path / "b", clients=2, id_count=3)
    assert [one.take(), two.take(), one.take()] == [0, 1, 2]
    one.note(0, (1, 2, 3, 4, 5))
    two.note(1, (1, 1, 1, 1, 1))
    assert one.totals() == dict(zip(Progress.FIELDS, (2, 3, 4, 5, 6), strict=True))
    two.stop()
    one.next_phase()
    assert one.stopped
    assert two.phase == 1
    one.close()
    two.close()


def test_report_adds_clients_up() -> None:
    """The report is the sum of the clients; without a restore its figures are null, not zero."""
    one = Tally(requests=1, input_tokens=60, hit_tokens=30, hit_tokens_by_tier={"host": 30})
    two = Tally(requests=2, input_tokens=40, hit_tokens=10, hit_tokens_by_tier={"host": 10})
    figures = report([one, two], 2.0)
    assert figures["requests"] == 3
    assert figures["token_hit_ratio"] == 0.4
    assert figures["token_hit_ratio_by_tier"] == {"host": 0.4}
    assert figures["restore_p99_seconds"] is None
    assert figures["restore_bytes_per_second"] is None
