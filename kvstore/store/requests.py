"""Requests: which one a lookup, a put or a finish belongs to; residency hears of each once.

lookup -> a new request, or one that is known by its id -> its blocks' statistics
put -> the request that was looked up before -> finish -> output length and hints
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvstore.core.plan import NO_ASK, Ask, Query, ReuseHints
from kvstore.core.space import Space
from kvstore.policies.residency import Residency
from kvstore.policies.reuse_model import ReuseModel
from kvstore.policies.uses import (
    REUSE_HINTS,
    UNKNOWN_TOKENS,
    Hint,
    Request,
    Use,
    grain_blocks,
    prefix_digests,
)
from kvstore.store.sessions import Attachment

DIGEST_BYTES = 8
# What lies deeper in a prompt is taken to be like what is known of its beginning.
GRAINS_MAX = 2048
REQUESTS_KEPT = 1 << 14
PROMPTS_KEPT = 1 << 10  # the last ones of engines
SESSIONS_KEPT = 1 << 14


class Known(NamedTuple):
    """A request that engines may speak of again; `grains` are the digests it was told with."""

    use: Use
    grains: int
    is_finished: bool = False


class Prompt(NamedTuple):
    """The last prompt that an engine looked up in a space, by its digests."""

    use: Use
    root: bytes
    digests: bytes


Listener = Callable[[Space, Request, Use], None]


class RequestBook:
    """Tells residency of requests, in the order in which they are first heard of.

    An engine's ranks look the same request up under one id; without an id each lookup is a request
    of its own, and a put belongs to the engine's last one if its prompt agrees. `listeners` hear
    every new request, `finished` of every end.
    """

    def __init__(self, residency: Residency, now: Callable[[], float]) -> None:
        self._residency = residency
        self._now = now
        self._known: dict[Any, Known] = {}
        self._prompts: dict[Any, Prompt] = {}
        self._turns: dict[tuple[str, str], int] = {}
        self.listeners: list[Listener] = []
        self.finished: list[Callable[[Use, int], None]] = []
        self.session = ""
        """The client's name for the session of the request that listeners hear of."""

    def looked_up(self, attachment: Attachment, query: Query, ask: Ask) -> Use | None:
        """The request of a lookup, from now on the one that is served."""
        key = _key(attachment, query.request_id)
        known = self._known.get(key)
        if known is not None and not known.is_finished:
            self._extend(key, known, attachment, query)
            use: Use | None = known.use
        elif attachment.shard and not query.request_id:
            use = None  # the first shard speaks for all
        else:
            use = self._tell(attachment, query, ask)
        self._residency.serve(use)
        return use

    def put(self, attachment: Attachment, query: Query, first_block: int) -> Use | None:
        """The request that a put belongs to, a new one if there was no lookup."""
        key = _key(attachment, query.request_id)
        known = self._known.get(key)
        if known is not None:
            self._extend(key, known, attachment, query)
            return known.use
        place = _place(attachment)
        last = self._prompts.get(place)
        if not query.request_id and last is not None:
            if first_block:
                return last.use
            root, digests = self._digests(attachment, query)
            if root == last.root and _agree(digests, last.digests):
                more = digests[len(last.digests) :]
                if more:
                    self._residency.extend(last.use, more)
                    self._prompts[place] = last._replace(digests=digests)
                return last.use
        if attachment.shard or not query.chain.block_count:
            return None
        return self._tell(attachment, query, NO_ASK)

    def finish(
        self, attachment: Attachment, request_id: str, output_tokens: int, reuse: ReuseHints
    ) -> None:
        """A request ended. Only the first of its ranks to say so counts."""
        key = _key(attachment, request_id)
        known = self._known.get(key)
        if known is None or known.is_finished:
            return
        self._known[key] = known._replace(is_finished=True)
        output = output_tokens or UNKNOWN_TOKENS
        self._residency.finish(known.use, output, _hint(reuse))
        for finished in self.finished:
            finished(known.use, output)

    def hint_beliefs(self) -> list[tuple[str, str, float]]:
        """(tenant, hint, factor): how much more is reused than hints of this kind let expect."""
        model = self._residency.context.models.get(ReuseModel)
        return list(model.hints.beliefs()) if isinstance(model, ReuseModel) else []

    def _tell(self, attachment: Attachment, query: Query, ask: Ask) -> Use:
        space, reuse = attachment.space, query.reuse
        root, digests = self._digests(attachment, query)
        request = Request(
            space.tenant,
            self._now(),
            digests,
            ask.prompt_tokens or query.chain.block_count * space.block_size,
            UNKNOWN_TOKENS,
            *_hint(reuse),
            turn=reuse.turn or self._turn(space.tenant, reuse.session),
            grain_blocks=grain_blocks(space),
        )
        use = self._residency.request(request)
        if query.request_id:
            key = _key(attachment, query.request_id)
            _keep(self._known, key, Known(use, len(digests) // DIGEST_BYTES), REQUESTS_KEPT)
        else:
            _keep(self._prompts, _place(attachment), Prompt(use, root, digests), PROMPTS_KEPT)
        self.session = reuse.session
        for listener in list(self.listeners):
            listener(space, request, use)
        return use

    def _turn(self, tenant: str, session: str) -> int:
        """Which request of a session this is; 0 where the client names none."""
        if not session:
            return 0
        turn = self._turns.pop((tenant, session), 0) + 1
        _keep(self._turns, (tenant, session), turn, SESSIONS_KEPT)
        return turn

    def _extend(self, key: Any, known: Known, attachment: Attachment, query: Query) -> None:
        """A request that is known may come with more blocks than before."""
        grains = query.chain.block_count // known.use.grain
        if min(grains, GRAINS_MAX) > known.grains:
            _, digests = self._digests(attachment, query)
            self._residency.extend(known.use, digests[known.grains * DIGEST_BYTES :])
            self._known[key] = known._replace(grains=len(digests) // DIGEST_BYTES)

    def _digests(self, attachment: Attachment, query: Query) -> tuple[bytes, bytes]:
        """(root, packed digests) of a prompt."""
        root = attachment.root_digest(query.adapter, query.cache_salt)
        grain, chain = grain_blocks(attachment.space), query.chain
        if chain.block_count > GRAINS_MAX * grain:
            chain = chain.cut(GRAINS_MAX * grain)
        return root, prefix_digests(attachment.space, root, chain, grain)


def _key(attachment: Attachment, request_id: str) -> Any:
    return (attachment.engine.key, attachment.space.number, request_id) if request_id else None


def _place(attachment: Attachment) -> Any:
    return attachment.engine.key, attachment.space.number


def _hint(reuse: ReuseHints) -> Hint:
    return Hint(REUSE_HINTS[reuse.expect_reuse], reuse.expect_reuse_seconds, reuse.priority)


def _agree(digests: bytes, others: bytes) -> bool:
    """Whether one prompt is the beginning of the other."""
    both = min(len(digests), len(others))
    return digests[:both] == others[:both]


def _keep(table: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Files a value as the newest; the oldest beyond the limit is forgotten."""
    table.pop(key, None)
    table[key] = value
    if len(table) > limit:
        del table[next(iter(table))]
