"""The demo of a real engine: users chat over one long system prompt, with the store and without.

a few lengths computed -> every user's first turn -> kill -9, start -> second turns, from host ->
flush, start with nothing but the disk -> third turns, from disk -> prompts of many lengths, for the
cost models
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvstore.client import KVClient, ReuseHints, Space
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import KVStoreError
from kvstore.engines.dynamic_cache import CacheBlocks
from kvstore.engines.generating import Answer, decode, prefill_alone
from kvstore.engines.transformers import Prefill, prefill_with_store, spec_of
from kvstore.policies.cost import (
    LinkCost,
    LinkIdentity,
    PathModel,
    RecomputeIdentity,
    RecomputeModel,
)
from kvstore.replay.chat_script import first_turn, later_turn
from kvstore.replay.own_daemon import OwnDaemon
from kvstore.replay.witness import Witness

BLOCK_TOKENS = 32
ANSWER_TOKENS = 20
CALL_TIMEOUT_SECONDS, PUT_TIMEOUT_SECONDS, BACK_SECONDS = 2.0, 30.0, 20.0
# Prompts of so many tokens, restored but for the last part, show how costs grow.
LENGTHS = (64, 96, 128, 192, 288, 416, 608, 896)
# The same of some that nobody has stored. The first ones are computed before the conversations:
# what is known of a processor beforehand may be a hundred times off.
COMPUTED_LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FIRST_LENGTHS = COMPUTED_LENGTHS[:6]
COSTS_NAME = "costs.json"


class Turn(msgspec.Struct, frozen=True):
    """One question and its answer, with the store and without."""

    user: str
    turn: int
    question: str
    answer: str
    prompt_tokens: int
    restored_tokens: dict[str, int]
    computed_tokens: int
    ttft_seconds: float
    store_seconds: float
    ttft_alone_seconds: float
    is_same_answer: bool
    logits_difference: float
    reason: str
    problem: str


@dataclass
class Chat:
    """A model and what turns texts into its tokens and back."""

    model: Any
    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stop: Sequence[int] = ()
    system: str = ""
    questions: Mapping[str, Sequence[str]] = field(default_factory=dict)


class ChatDemo:
    """The conversations, on a daemon of our own whose disk tier is in `disk`."""

    def __init__(self, chat: Chat, daemon: OwnDaemon, disk: Path) -> None:
        self._chat, self._daemon, self._disk = chat, daemon, disk
        self._spec = spec_of(chat.model, name=chat.name, block_size=BLOCK_TOKENS)
        self._said: dict[str, list[int]] = {user: [] for user in chat.questions}
        self._witness = Witness(self._spec)
        self._client = KVClient.connect(
            daemon.target, call_timeout_seconds=CALL_TIMEOUT_SECONDS,
            put_timeout_seconds=PUT_TIMEOUT_SECONDS, client_name="demo",
        )  # fmt: skip
        self._space: Space = self._client.attach(
            self._spec, plan_shapes=("prefix", "split"), engine_build="demo", device="cpu"
        )
        self.turns: list[Turn] = []
        self.events: list[str] = []
        self.wrong_bytes = 0

    def run(self, on_turn: Callable[[Turn | str], None] | None = None) -> dict[str, Any]:
        """Everything; `on_turn` hears of each turn, and in words of what happens in between."""
        say = on_turn or (lambda told: None)
        # What a process does once, it does here: no first token has to wait for it.
        prefill_alone(self._chat.model, self._chat.encode(later_turn("?")))
        self._compute_lengths(self._chat.encode(self._chat.system), FIRST_LENGTHS)
        for number in range(max(map(len, self._chat.questions.values()))):
            if number:
                told = self._kill() if number == 1 else self._reboot()
                self.events.append(told)
                say(told)
            for user, questions in self._chat.questions.items():
                if number < len(questions):
                    self.turns.append(self._turn(user, number, questions[number]))
                    say(self.turns[-1])
        self._vary_lengths()
        self._client.close()
        self._daemon.stop()
        return self._result()

    def _turn(self, user: str, number: int, question: str) -> Turn:
        chat, said = self._chat, self._said[user]
        text = later_turn(question) if said else first_turn(chat.system, question)
        ids = [*said, *chat.encode(text)]
        done, answer, alone, other = self._both(user, number, ids)
        self.wrong_bytes += self._witness.wrong_bytes(ids[: done.restored_tokens], done.cache)
        every = [*ids, *answer.tokens]
        self._store(every[:-1], done, f"{user}-{number}", len(answer.tokens))
        # An answer that was cut short is ended all the same, as the model expects it.
        cut = chat.stop and every[-1] not in chat.stop
        self._said[user] = [*every, *chat.stop[:1]] if cut else every
        return Turn(
            user=user,
            turn=number + 1,
            question=question,
            answer=chat.decode([token for token in answer.tokens if token not in chat.stop]),
            prompt_tokens=len(ids),
            restored_tokens={"host": 0, "disk": 0, **done.sources},
            computed_tokens=done.computed_tokens,
            ttft_seconds=done.seconds,
            store_seconds=done.store_seconds,
            ttft_alone_seconds=alone.seconds,
            is_same_answer=answer.tokens == other.tokens,
            logits_difference=float((done.logits - alone.logits).abs().max()),
            reason=done.reason,
            problem=done.problem,
        )

    def _both(
        self, user: str, number: int, ids: list[int]
    ) -> tuple[Prefill, Answer, Prefill, Answer]:
        """The same prompt with the store and without, in turns who comes first."""
        chat = self._chat

        def with_store() -> tuple[Prefill, Answer]:
            done = prefill_with_store(
                chat.model, ids, self._space, request_id=f"{user}-{number}",
                hints=ReuseHints(session=user, turn=number + 1),
            )  # fmt: skip
            return done, decode(chat.model, done, ANSWER_TOKENS, chat.stop)

        def without() -> tuple[Prefill, Answer]:
            done = prefill_alone(chat.model, ids)
            return done, decode(chat.model, done, ANSWER_TOKENS, chat.stop)

        if len(self.turns) % 2:
            alone, own = without(), with_store()
        else:
            own, alone = with_store(), without()
        return *own, *alone

    def _store(self, ids: list[int], done: Prefill, request: str, output_tokens: int) -> None:
        """Stores the answer's blocks, too: the next turn begins with them."""
        try:
            result = self._space.put(ids, CacheBlocks(done.cache, self._spec), request_id=request)
            self._space.finish_request(request, output_tokens)
        except KVStoreError as error:
            self.events.append(str(error))
            return
        if result.rejected:
            self.events.append(result.reason)
            return
        self._witness.stored(ids, done.cache)

    # ---- The daemon ----

    def _kill(self) -> str:
        self._daemon.kill()
        seconds = self._daemon.start()
        self._wait()
        return f"The daemon was killed with signal 9 and serves again after {seconds:.1f} s."

    def _reboot(self) -> str:
        blocks = self._daemon.flush()["durable_blocks"]
        self._daemon.stop(free=True)
        seconds = self._daemon.start()
        self._wait()
        return (
            f"The daemon wrote {blocks} blocks to disk, left, lost its host memory as in a reboot, "
            f"and serves again after {seconds:.1f} s."
        )

    def _wait(self) -> None:
        """Until our client has found its way back by itself."""
        end = perf_seconds() + BACK_SECONDS
        while not self._client.available and perf_seconds() < end:
            sleep(0.02)

    # ---- What things cost here ----

    def _vary_lengths(self) -> None:
        self._compute_lengths(next(iter(self._said.values())), COMPUTED_LENGTHS)
        for said in self._said.values():
            for length in LENGTHS:
                if length < len(said):
                    prefill_with_store(self._chat.model, said[:length], self._space, store=False)

    def _compute_lengths(self, ids: list[int], lengths: Sequence[int]) -> None:
        for length in lengths:
            prefill_with_store(
                self._chat.model, ids[:length], self._space, cache_salt="costs", store=False
            )

    def _result(self) -> dict[str, Any]:
        with_store = sum(turn.ttft_seconds for turn in self.turns)
        alone = sum(turn.ttft_alone_seconds for turn in self.turns)
        return {
            "model": self._chat.name,
            "bytes_per_token": self._spec.bytes_per_token,
            "turns": [msgspec.structs.asdict(turn) for turn in self.turns],
            "events": self.events,
            "ttft_ratio": with_store / alone if alone else math.nan,
            "different_answers": sum(not turn.is_same_answer for turn in self.turns),
            "logits_difference_max": max(turn.logits_difference for turn in self.turns),
            "wrong_bytes": self.wrong_bytes,
            "costs": fitted(self._disk, self._spec),
        }


def fitted(directory: Path, spec: Any) -> dict[str, Any]:
    """The models that a daemon has left in its directory: a, b and c, and each link's L and B."""
    found = sorted(directory.rglob(COSTS_NAME))
    saved = msgspec.json.decode(found[0].read_bytes())["models"] if found else []
    costs: dict[str, Any] = {"recompute": None, "links": {}}
    for one in saved:
        identity = one["identity"]
        if len(identity) == len(RecomputeIdentity._fields):
            compute = RecomputeModel(RecomputeIdentity(*identity))
            if compute.load(one) and identity[1] == spec.revision:
                costs["recompute"] = {
                    **compute.cost()._asdict(), **_facts(compute)
                }  # fmt: skip
            continue
        path = PathModel(LinkIdentity(*identity), LinkCost.of(20e-6, 20e9))
        if path.load(one):
            costs["links"][identity[0]] = {**path.cost()._asdict(), **_facts(path)}
    return costs


def _facts(model: RecomputeModel | PathModel) -> dict[str, Any]:
    state = model.state
    return {"samples": model.sample_count, "state": state.name, "state_reason": state.reason}
