"""Costs: what engines and links were measured to cost, and the file that keeps it.

Models are of what they were measured on. One that was saved waits until its engine or link turns
up again under the same identity; measurements of anything else begin anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from kvstore.core.errors import InvalidRequest, KVStoreError, LimitReached
from kvstore.core.views import CostView
from kvstore.mover import (
    ARENA_IN_LINK,
    ARENA_LINKS,
    ARENA_OUT_LINK,
    DISK_LINKS,
    LINKS,
    PEER_LINK,
    READ_LINK,
    RECORD_LINK,
    WRITE_LINK,
    Job,
    Moved,
)
from kvstore.policies.cost import (
    P50,
    P99,
    LinkCost,
    LinkIdentity,
    MeasuredModel,
    PathModel,
    RecomputeIdentity,
    RecomputeModel,
)
from kvstore.store.link_use import LinkUse
from kvstore.store.sessions import Attachment

SAMPLES_MIN = 8  # measurements before a model decides anything
MODELS_MAX = 64  # of engines, and of links; each takes a few KiB and is written down whole
SAVE_SECONDS = 60.0
OVERDUE_MAX = 16  # transfers that are looked at in a turn, the oldest
VERSION = 1
OWN_LINKS = frozenset((*LINKS, *DISK_LINKS, *ARENA_LINKS))
DEVICE_LINK = "hbm>hbm"  # over which an engine takes in what lies on its own GPU
UPWARD = "host>"  # names of links over which an engine takes restored blocks in begin so
# What `kvstore status` predicts for each model.
SHOWN_TOKENS, SHOWN_BYTES = 8192, 1 << 30

# Believed until measured: an NVMe disk read, one written, and copies over 16 lanes of PCIe 4,
# within a GPU's memory and from one to another, over 16 lanes of PCIe 5 or a link of their own.
PRIORS = {
    READ_LINK: LinkCost.of(100e-6, 2e9),
    WRITE_LINK: LinkCost.of(1e-3, 1e9),
    ARENA_IN_LINK: LinkCost.of(100e-6, 20e9),
    ARENA_OUT_LINK: LinkCost.of(100e-6, 500e9),
    PEER_LINK: LinkCost.of(100e-6, 50e9),
}
ENGINE_PRIOR = LinkCost.of(20e-6, 20e9)


class UnderWay(NamedTuple):
    """A transfer that is not over; `counted` is how long it had taken when it last counted.

    Of one in several parts, `due_bytes` are those that have come and the part that comes next,
    `told_bytes` those that had come when a part last counted.
    """

    identity: LinkIdentity
    began: float
    byte_count: int
    queued_bytes: int
    counted: float = 0.0
    due_bytes: int = 0
    told_bytes: int = 0


class CostBook:
    """The models, by identity. `disk` is what the daemon's own links to a disk lead to."""

    def __init__(self, disk: str = "") -> None:
        self.notes: list[str] = []
        self.changed = False
        self._engines: dict[RecomputeIdentity, RecomputeModel] = {}
        self._links: dict[LinkIdentity, PathModel] = {}
        self._upward: dict[str, PathModel] = {}  # by the engine's device
        self._under_way: dict[int, UnderWay] = {}
        self._begun = 0
        # Of links that have models, and of no others.
        self._uses: dict[LinkIdentity | RecomputeIdentity, LinkUse] = {}
        self._saved: dict[tuple[Any, ...], Any] = {}  # of what has not turned up yet
        self._written: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self.read_link = LinkIdentity(READ_LINK, disk)
        self.write_link = LinkIdentity(WRITE_LINK, disk)

    # ---- Measurements ----

    def observe_step(
        self, identity: RecomputeIdentity, seconds: float, prefill: Sequence[tuple[int, int]],
        decode_tokens: int = 0, decode_context_tokens: int = 0,
    ) -> None:  # fmt: skip
        """One step of an engine; what can be none changes nothing but a count of the model."""
        model = self.engine(identity)
        if model is None:
            self._check_room(self._engines, "engines")
            model = self._engines[identity] = RecomputeModel(identity)
        if model.observe(seconds, prefill, decode_tokens, decode_context_tokens):
            self.changed = True

    def observe_transfer(
        self, identity: LinkIdentity, seconds: float, byte_count: int, queued_bytes: int = 0
    ) -> None:
        """One transfer over a link, from when it was asked for until it was there."""
        model = self.link(identity)
        if model is None:
            self._check_room(self._links, "links")
            model = PathModel(identity, PRIORS.get(identity.link, ENGINE_PRIOR))
            self._add_link(model)
        if model.observe(seconds, byte_count, queued_bytes):
            self.changed = True

    def begin_transfer(self, under_way: UnderWay) -> int:
        """A transfer of the daemon's own begins; answers with what `end_transfer` calls it."""
        self._begun += 1
        self._under_way[self._begun] = under_way
        self._use(under_way.identity, under_way.began).change(under_way.began, 1)
        return self._begun

    def part_arrived(self, number: int, now: float, arrived_bytes: int, due_bytes: int) -> None:
        """Leading parts of a transfer are there; `due_bytes` will be with the next.

        Until the model is fitted they count like a transfer of their own, each twice the last.
        """
        one = self._under_way[number]
        model = self.link(one.identity)
        counts = not one.queued_bytes and 2 * one.told_bytes <= arrived_bytes < one.byte_count
        if counts and (model is None or model.state.name != "fitted"):
            self.observe_transfer(one.identity, now - one.began, arrived_bytes)
            one = one._replace(told_bytes=arrived_bytes)
        self._under_way[number] = one._replace(due_bytes=due_bytes)

    def transfer_is_late(self, number: int, now: float) -> None:
        """A transfer is not waited for any more: it takes at least as long as it has."""
        one = self._under_way[number]
        if now - one.began > one.counted:
            due = one.due_bytes or one.byte_count
            self.observe_transfer(one.identity, now - one.began, due, one.queued_bytes)

    def end_transfer(self, number: int, now: float, is_whole: bool) -> None:
        """It is over; one that failed half way says nothing about the time it takes."""
        one = self._under_way.pop(number)
        self._use(one.identity, now).change(now, -1)
        if is_whole:
            seconds = now - one.began
            self.observe_transfer(one.identity, seconds, one.byte_count, one.queued_bytes)

    def look_at_overdue(self, now: float) -> None:
        """Has the oldest transfers under way count before they end, if they take far too long."""
        for number, one in list(islice(self._under_way.items(), OVERDUE_MAX)):
            model, seconds = self.link(one.identity), now - one.began
            if model is None or model.sample_count < SAMPLES_MIN or seconds < 2 * one.counted:
                continue
            due = one.due_bytes or one.byte_count
            if model.observe_overdue(seconds, due, one.queued_bytes):
                self._under_way[number] = one._replace(counted=seconds)
                self.changed = True

    # ---- Use ----

    def waiting(self, identity: LinkIdentity | RecomputeIdentity, now: float) -> float:
        """How many transfers over a link waited for others of late, on average."""
        use = self._uses.get(identity)
        return use.waiting(now) if use is not None else 0.0

    def quiet_seconds(self, identity: LinkIdentity, now: float) -> float:
        """How long ago a transfer of the daemon's own over a link began or ended."""
        use = self._uses.get(identity)
        return now - use.changed if use is not None else math.inf

    def used(self, identity: LinkIdentity, now: float, seconds: float) -> None:
        """A link that others watch was busy for so long until now."""
        self._use(identity, now).was_busy(now, seconds)

    def _use(self, identity: LinkIdentity, now: float) -> LinkUse:
        use = self._uses.get(identity)
        if use is None:
            use = self._uses[identity] = LinkUse(now)
        return use

    def _check_room(self, models: Any, what: str) -> None:
        if len(models) >= MODELS_MAX:
            raise LimitReached(
                f"costs of {MODELS_MAX} {what} are measured already; give them fewer identities"
            )

    def _add_link(self, model: PathModel) -> None:
        identity = model.identity
        assert isinstance(identity, LinkIdentity)
        self._links[identity] = model
        if identity.link not in OWN_LINKS and identity.link.startswith(UPWARD):
            self._upward[identity.device] = model

    # ---- Models ----

    def engine(self, identity: RecomputeIdentity) -> RecomputeModel | None:
        """An engine's model; None while nothing is known of it."""
        model = self._engines.get(identity)
        if model is None and identity in self._saved:
            model = RecomputeModel(identity)
            if self._take_over(model):
                self._engines[identity] = model
                return model
            return None
        return model

    def link(self, identity: LinkIdentity) -> PathModel | None:
        model = self._links.get(identity)
        if model is None and identity in self._saved:
            model = PathModel(identity, PRIORS.get(identity.link, ENGINE_PRIOR))
            if self._take_over(model):
                self._add_link(model)
                return model
            return None
        return model

    def upward(self, device: str) -> PathModel | None:
        """The link over which engines on `device` take blocks in; None if none ever told."""
        return self._upward.get(device)

    def fastest_upward(self) -> PathModel | None:
        """Of the links over which engines take blocks in, the quickest that is measured."""
        known = [model for model in self._upward.values() if model.sample_count >= SAMPLES_MIN]
        return min(known, key=lambda model: model.seconds(SHOWN_BYTES), default=None)

    def _take_over(self, model: MeasuredModel) -> bool:
        if model.load(self._saved.pop(tuple(model.identity))):
            return True
        self.notes.append(f"costs of {model.identity}: {model.unread}; measured anew")
        return False

    def __iter__(self) -> Iterator[RecomputeModel | PathModel]:
        yield from self._engines.values()
        yield from self._links.values()

    def views(self) -> list[CostView]:
        """The models as status shows them, with what they predict."""
        return [_view(model) for model in self]

    # ---- The file ----

    def dump(self) -> bytes:
        """All models as JSON, those that have not turned up since the start included."""
        models: list[Any] = list(self._saved.values())
        for model in self:
            key = tuple(model.identity)
            known = self._written.get(key)
            if known is None or known[0] != model.sample_count:
                known = self._written[key] = (model.sample_count, model.dump())
            models.append(known[1])
        return msgspec.json.encode({"version": VERSION, "models": models})

    def load(self, raw: bytes | None) -> None:
        """Takes over what `dump` made; anything else leaves everything unmeasured, with a note."""
        if raw is None:
            return
        try:
            saved = msgspec.json.decode(raw)
            if saved["version"] != VERSION:
                raise ValueError
            found = {_identity(each["identity"]): each for each in saved["models"]}
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError):
            self.notes.append("the saved costs are damaged; they are measured anew")
            return
        self._saved = dict(list(found.items())[-2 * MODELS_MAX :])
        for key in list(self._saved):
            if len(key) != len(LinkIdentity._fields):
                continue
            identity = LinkIdentity(*key)
            own = {own.link: own for own in (self.read_link, self.write_link)}
            expected = own.get(identity.link)
            if expected is not None and identity != expected:
                self.notes.append(
                    f"the saved costs of {identity.link} are of {identity.device!r}, not of "
                    f"{expected.device!r}; they are measured anew"
                )
                del self._saved[key]
            else:
                self.link(identity)


def _identity(saved: Any) -> tuple[Any, ...]:
    """The identity of a saved model as a key; raises ValueError for what is none."""
    key = tuple(saved)
    kinds: tuple[type, ...] = (str, str)
    if len(key) == len(RecomputeIdentity._fields):
        kinds = (str, str, str, str, int)
    if len(key) != len(kinds) or not all(map(isinstance, key, kinds)):
        raise ValueError
    return key


def _view(model: RecomputeModel | PathModel) -> CostView:
    if isinstance(model, RecomputeModel):
        seconds = model.seconds(SHOWN_TOKENS)
        assert isinstance(model.identity, RecomputeIdentity)
        subject, device, unit = model.identity.model, model.identity.device, "tokens"
    else:
        seconds = model.seconds(SHOWN_BYTES)
        assert isinstance(model.identity, LinkIdentity)
        subject, device, unit = model.identity.link, model.identity.device, "bytes"
    state = model.state
    return CostView(
        subject, device, unit, state.name, state.reason, model.sample_count, seconds,
        model.ratio(P50), model.ratio(P99),
    )  # fmt: skip


class CostKeeper:
    """Writes the book down once a minute if it has changed, and when the daemon stops."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self._due = parts.clock.now() + SAVE_SECONDS
        parts.costs.load(parts.record.saved_costs())

    def report_step(
        self, attachment: Attachment, seconds: float, prefill: Sequence[tuple[int, int]],
        decode_tokens: int = 0, decode_context_tokens: int = 0, request_ids: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """A step that an engine measured, of (new, cached) tokens of each prompt in it.

        `request_ids` has the request of each, empty where the engine does not tell.
        """
        self._parts.costs.observe_step(
            attachment.recompute_identity, seconds, prefill, decode_tokens, decode_context_tokens
        )
        for request_id, (new, cached) in zip(request_ids, prefill, strict=False):
            if request_id:
                self._parts.decisions.computed(attachment, request_id, seconds, new, cached)

    def report_transfer(
        self, attachment: Attachment, link: str, byte_count: int, seconds: float,
        lease_id: int = 0,
    ) -> None:  # fmt: skip
        """A copy that an engine measured, over a link of its own; of which match, if of one."""
        if link in OWN_LINKS:
            raise InvalidRequest(
                f"link is {link!r}, which the daemon measures itself; pass one of the engine's, "
                "such as 'host>hbm'"
            )
        identity, book = LinkIdentity(link, attachment.device), self._parts.costs
        book.observe_transfer(identity, seconds, byte_count)
        book.used(identity, self._parts.clock.now(), seconds)
        lease = attachment.engine.leases.get(lease_id)
        is_load = link == DEVICE_LINK or link.startswith(UPWARD)
        if lease is not None and lease.decision is not None and is_load:
            lease.decision.copied(attachment.session.id, seconds)

    def tick(self, now: float) -> None:
        self._parts.costs.look_at_overdue(now)
        if now >= self._due:
            self._due = now + SAVE_SECONDS
            self.save()

    def save(self) -> None:
        """Writes what has changed: at once, or on a worker where the record is slow."""
        parts, book = self._parts, self._parts.costs
        if not book.changed:
            return
        raw, record = book.dump(), parts.record
        book.changed = False
        if not record.durable_slow:
            try:
                record.save_costs(raw)
            except KVStoreError:
                book.changed = True  # again in a minute
            return

        def done(moved: Moved) -> None:
            book.changed = book.changed or moved.error is not None

        job = Job(RECORD_LINK, "", 0, 0, lambda: record.save_costs(raw), done)
        book.changed = not parts.mover.submit(job)
