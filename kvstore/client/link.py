"""`Link`: the client's one live session, its circuit breaker and its way back.

    UP --no answer in time--> SILENT --a probe is answered--> UP
     |--connection gone---------> DOWN --connected, spaces attached--> UP
     `--notice or refusal--> DRAINING --connection gone--> DOWN

Only UP takes calls; in the other states they raise StoreUnavailable at once and the background
thread alone waits for the daemon. A silent daemon's session is kept, with its leases, until the
daemon would have ended it itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.client.gate import Gate
from kvstore.client.session import Attachment, Session, client_name
from kvstore.client.transport import CallTimeout, Transport
from kvstore.core.clock import Clock
from kvstore.core.errors import Draining, KVStoreError, StoreUnavailable

if TYPE_CHECKING:
    from kvstore.client.space import Space

TICK_SECONDS = 0.05  # the longest that a release waits for company
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.05, 1.0


class LinkState(Enum):
    UP = "up"
    SILENT = "silent"
    DRAINING = "draining"
    DOWN = "down"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits of calls: lookups and small calls, puts and restores, opening and attaching."""

    call_seconds: float = 0.1
    put_seconds: float = 5.0
    attach_seconds: float = 5.0
    admin_seconds: float = 10.0
    probe_seconds: float = 1.0


class Link:
    """Keeps one session with the daemon alive, or tries to.

    `connect(timeout)` makes a new connection. With `background` False nothing happens by itself:
    `step` does what the background thread would do next.
    """

    def __init__(
        self,
        connect: Callable[[float], Transport],
        clock: Clock,
        timeouts: Timeouts,
        name: str = "",
        background: bool = True,
        staging_bytes: int = 0,
    ) -> None:
        self.clock = clock
        self.timeouts = timeouts
        self.state = LinkState.DOWN
        self._connect = connect
        self._name = name or client_name()
        self._background = background
        self._staging_bytes = staging_bytes
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._wake = Gate()
        self._thread: threading.Thread | None = None
        self._spaces: weakref.WeakSet[Space] = weakref.WeakSet()
        self._session: Session | None = None  # the one that takes calls
        self._kept: Session | None = None  # alive, UP or not
        self._reason = "no session is open"
        self._retry_at = 0.0
        self._retry_seconds = RETRY_SECONDS_MIN
        self._leaves_at = 0.0

    # ---- What callers use ----

    def session(self) -> Session:
        """The live session; raises StoreUnavailable at once when there is none."""
        self.check_process()
        session = self._session
        if session is None:
            raise StoreUnavailable(self._reason)
        return session

    def session_for_admin(self) -> Session:
        """As `session`, but one that is draining will do: an operator may watch it leave."""
        self.check_process()
        kept = self._kept
        if kept is not None and self.state is LinkState.DRAINING:
            return kept
        return self.session()

    @property
    def available(self) -> bool:
        return self._session is not None and not self.is_inherited

    @property
    def is_inherited(self) -> bool:
        """Whether this process got the client by a fork."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises StoreUnavailable in a forked child: connection and locks are its parent's."""
        if os.getpid() != self._pid:
            raise StoreUnavailable(
                f"this client belongs to process {self._pid}, which forked this one; call "
                "KVClient.connect() after the fork"
            )

    def attachment(self, space: Space) -> Attachment:
        """The space in the live session."""
        session = self._session
        if session is None or os.getpid() != self._pid:
            session = self.session()
        attachment = space.attached
        if attachment is None or attachment.session is not session:
            attachment = session.attachments.get(space)
        if attachment is None:
            if session.ended:
                raise StoreUnavailable(session.ended)
            raise session.refusals.get(space) or StoreUnavailable(
                f"{space!r} is not attached; call client.attach() again"
            )
        return attachment

    def open(self) -> None:
        """The first session; raises what keeps it from opening."""
        self._install(self._new_session())

    def attach(self, space: Space) -> Attachment:
        """Attaches a new space; from now on every new session attaches it too."""
        session = self.session()
        self._spaces.add(space)  # before the call: a session that opens meanwhile must not miss it
        try:
            return session.attach(space, self.timeouts.attach_seconds)
        except BaseException:
            self._spaces.discard(space)
            raise

    def start_background(self) -> None:
        """Starts the thread that keeps the session, if it does not run yet.

        One that an interrupt kept from starting gets a successor, and ends if it runs after all.
        """
        if not self._background or (self._thread is not None and self._thread.is_alive()):
            return
        with self._lock:
            is_there = self._thread is not None and self._thread.is_alive()
            if not is_there and self.state is not LinkState.CLOSED:
                self._thread = threading.Thread(
                    target=_keep, args=(weakref.ref(self), self._wake), name="kvstore-client",
                    daemon=True,
                )  # fmt: skip
                self._thread.start()

    def close(self) -> None:
        if self.is_inherited:
            return  # the parent's to close; its locks may be held for ever in this process
        with self._lock:
            kept, thread = self._kept, self._thread
            self.state = LinkState.CLOSED
            self._session = self._kept = None
            self._reason = "the client is closed; make a new one with KVClient.connect()"
        self._wake.open()
        if kept is not None:
            kept.flush()
            kept.end("the client was closed")
        if thread is not None and thread is not threading.current_thread():
            thread.join(self.timeouts.probe_seconds)

    # ---- The breaker ----

    def trouble(self, session: Session, error: KVStoreError) -> None:
        """An error of `session` that speaks of the daemon: stop calling it."""
        with self._lock:
            if session is not self._kept or self.state is LinkState.CLOSED:
                return
            now = self.clock.now()
            if isinstance(error, CallTimeout):
                if self.state is LinkState.UP:
                    self._leave_up(LinkState.SILENT, str(error))
            elif isinstance(error, Draining):
                self._leave_up(LinkState.DRAINING, str(error))
                self._leaves_at = now + session.info.session_ttl_seconds
            else:
                self._leave_up(LinkState.DOWN, str(error))
                self._kept = None
        if self.state is LinkState.DOWN:
            session.end(str(error))
        self._wake.open()
        self.start_background()

    def _leave_up(self, state: LinkState, reason: str) -> None:
        self.state, self._session, self._reason = state, None, reason
        self._retry_seconds = RETRY_SECONDS_MIN
        self._retry_at = self.clock.now() + self._retry_seconds

    def _back_off(self) -> None:
        self._retry_seconds = min(2 * self._retry_seconds, RETRY_SECONDS_MAX)
        self._retry_at = self.clock.now() + self._retry_seconds

    # ---- The way back, on the background thread ----

    def is_kept_by(self, thread: threading.Thread) -> bool:
        """Whether the client is open, and this is its background thread."""
        return self.state is not LinkState.CLOSED and self._thread is thread

    def step(self) -> float:
        """Does what is due; answers with the seconds until the next step."""
        state, kept, now = self.state, self._kept, self.clock.now()
        try:
            if state is LinkState.UP and kept is not None:
                kept.upkeep(now, self.timeouts.probe_seconds)
                kept.touch_pools()
            elif state is LinkState.DRAINING and kept is not None:
                self._wait_for_leave(kept, now)
            elif now < self._retry_at or state is LinkState.CLOSED:
                pass
            elif state is LinkState.SILENT and kept is not None:
                self._probe(kept, now)
            else:
                self._install(self._new_session())
        except KVStoreError as error:
            self._failed(error)
        if self.state in (LinkState.UP, LinkState.DRAINING):
            return TICK_SECONDS
        return max(self._retry_at - self.clock.now(), 0.001)

    def _failed(self, error: KVStoreError) -> None:
        with self._lock:
            if self.state in (LinkState.SILENT, LinkState.DOWN):
                self._reason = str(error)
                self._back_off()

    def _wait_for_leave(self, session: Session, now: float) -> None:
        if now < self._leaves_at:
            session.upkeep(now, self.timeouts.probe_seconds)
        else:
            self._abandon(session, "the daemon drained and did not leave")

    def _probe(self, session: Session, now: float) -> None:
        if now - session.last_heard > session.info.session_ttl_seconds:
            self._abandon(session, "the daemon was silent for longer than a session lives")
            return
        session.renew(session.leases.due(now, 0.0), self.timeouts.probe_seconds)
        with self._lock:
            if self._kept is session and self.state is LinkState.SILENT:
                self.state, self._session, self._reason = LinkState.UP, session, ""

    def _abandon(self, session: Session, reason: str) -> None:
        with self._lock:
            if self._kept is session:
                self._kept = None
                self._leave_up(LinkState.DOWN, reason)
        session.end(reason)

    def _new_session(self) -> Session:
        timeout = self.timeouts.attach_seconds
        if self._thread is threading.current_thread():
            timeout = self.timeouts.probe_seconds
        transport = self._connect(timeout)
        try:
            session = Session(
                transport, self.clock, self._name, self._staging_bytes, timeout, self.trouble
            )
            for space in list(self._spaces):
                self._attach_again(session, space, timeout)
        except BaseException:
            transport.close()
            raise
        return session

    def _attach_again(self, session: Session, space: Space, timeout: float) -> None:
        try:
            session.attach(space, timeout)
        except StoreUnavailable:
            raise
        except KVStoreError as error:  # this space's trouble is not the others'
            session.refusals[space] = error

    def _install(self, session: Session) -> None:
        with self._lock:
            if self.state is not LinkState.CLOSED:
                self.state, self._reason = LinkState.UP, ""
                self._session = self._kept = session
                return
        session.end(self._reason)


def _keep(link_reference: weakref.ref[Link], wake: Gate) -> None:
    """Body of the background thread; ends when the client is closed, forgotten or has another."""
    delay = 0.0
    while True:
        wake.wait(delay)
        link = link_reference()
        if link is None or not link.is_kept_by(threading.current_thread()):
            return
        delay = link.step()
        del link
