"""Recordings: what a live daemon tells of the requests that come, turned into a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from kvstore.core.errors import StoreUnavailable
from kvstore.replay.formats import TraceError, TraceRequest

DEFAULT_TENANT = "default"
GONE = "the daemon went away"


class RecordedTrace:
    """Requests of a recording as those of a trace, and what there is to say of the whole.

    Ids are numbered by first appearance. What a daemon has no word for gets ids of its own: the
    last block of a prompt, if it is not full, and blocks too deep in it. Where the length of an
    output is not known it is 0.
    """

    def __init__(self, with_pseudonyms: bool = False) -> None:
        self.requests = self.without_output = self.left_out = self.held = 0
        self.block_size = 0
        self.seconds = 0.0
        self.ended = ""
        self._with_pseudonyms = with_pseudonyms
        self._ids: dict[int, int] = {}
        self._next_id = 0
        self._tenants: dict[str, str] = {}
        self._sessions: dict[int, str] = {}

    def follow(
        self, responses: Iterable[Any], on_response: Callable[[], None]
    ) -> Iterator[TraceRequest]:
        """The requests in `responses`; `on_response` is called after each of these, which may be
        without any. A daemon that goes away ends them; raises TraceError if there was none at all.
        """
        try:
            for response in responses:
                self.block_size = response.block_size
                self.left_out, self.held = response.left_out_count, response.held_count
                self.ended = response.ended
                for record in response.records:
                    yield self._request(record)
                on_response()
        except StoreUnavailable:
            self.ended = GONE
        if not self.requests:
            when = f" before {GONE}" if self.ended == GONE else ""
            raise TraceError(f"no request came{when}; no file was written")

    def _request(self, record: Any) -> TraceRequest:
        self.requests += 1
        self.seconds = record.seconds
        is_known = record.HasField("output_tokens")
        self.without_output += not is_known
        return TraceRequest(
            timestamp=round(1000 * record.seconds, 3),
            input_length=record.input_tokens,
            output_length=record.output_tokens if is_known else 0,
            hash_ids=self._hash_ids(record),
            tenant=self._tenant(record.tenant),
            session=self._session(record.session),
            block_size=self.block_size,
        )

    def _hash_ids(self, record: Any) -> list[int]:
        hash_ids = [self._id(word) for word in np.frombuffer(record.blocks, np.uint64).tolist()]
        while len(hash_ids) * self.block_size < record.input_tokens:
            hash_ids.append(self._new_id())
        return hash_ids

    def _id(self, word: int) -> int:
        known = self._ids.get(word)
        if known is None:
            known = self._ids[word] = self._new_id()
        return known

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _tenant(self, name: str) -> str:
        if name == DEFAULT_TENANT:
            return ""  # as in a trace that names none
        if not self._with_pseudonyms:
            return name
        return self._tenants.setdefault(name, f"t{len(self._tenants) + 1}")

    def _session(self, number: int) -> str:
        if not number:
            return ""
        return self._sessions.setdefault(number, f"s{len(self._sessions) + 1}")
