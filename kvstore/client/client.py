"""`KVClient`: the one object an engine makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from kvstore.client.address import TLSConfig, connector
from kvstore.client.admin import AdminCalls
from kvstore.client.link import Link, Timeouts
from kvstore.client.space import Space
from kvstore.client.transport import Transport
from kvstore.core.clock import Clock, SystemClock
from kvstore.core.spec import KVSpec
from kvstore.proto.v1 import kvstore_pb2 as pb


class KVClient:
    """A connection to the daemon, kept alive; any thread may use it, a forked child may not.

    With the daemon gone or frozen every call raises StoreUnavailable at once, and the client
    finds its way back on a thread of its own.
    """

    def __init__(self, link: Link, address: str = "") -> None:
        self._link = link
        self._address = address
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvstore-put")
        self.admin = AdminCalls(link)

    @classmethod
    def connect(
        cls,
        address: str | None = None,
        *,
        tls: TLSConfig | None = None,
        call_timeout_seconds: float = 0.1,
        put_timeout_seconds: float = 5.0,
        attach_timeout_seconds: float = 5.0,
        admin_timeout_seconds: float = 10.0,
        client_name: str = "",
        staging_bytes: int = 0,
    ) -> KVClient:
        """Connects to `unix:///path` on this host or `host:port` with `tls`.

        Without an address it looks where KVSTORE_SOCKET says, then in $XDG_RUNTIME_DIR/kvstore
        and /run/kvstore. `staging_bytes` is how much memory puts go through; 0 takes the daemon's
        default, and one that never puts needs next to none. Raises StoreUnavailable when no
        daemon answers.
        """
        clock = SystemClock()
        timeouts = Timeouts(
            call_seconds=call_timeout_seconds,
            put_seconds=put_timeout_seconds,
            attach_seconds=attach_timeout_seconds,
            admin_seconds=admin_timeout_seconds,
        )
        connect = connector(address, tls, clock)
        return cls.over(
            connect, timeouts=timeouts, clock=clock, client_name=client_name,
            address=address or "the default socket", staging_bytes=staging_bytes,
        )  # fmt: skip

    @classmethod
    def over(
        cls,
        connect: Callable[[float], Transport],
        *,
        timeouts: Timeouts | None = None,
        clock: Clock | None = None,
        client_name: str = "",
        background: bool = True,
        address: str = "",
        staging_bytes: int = 0,
    ) -> KVClient:
        """A client over connections that `connect(timeout)` makes, such as DirectTransport.

        With `background` False nothing happens by itself: the owner calls `keep` now and then.
        """
        link = Link(
            connect, clock or SystemClock(), timeouts or Timeouts(), client_name, background,
            staging_bytes,
        )  # fmt: skip
        link.open()
        return cls(link, address)

    def attach(
        self,
        spec: KVSpec,
        tenant: str = "default",
        shard: int = 0,
        engine_id: str = "",
        plan_shapes: Sequence[str] = ("prefix",),
        overlap: str = "none",
        engine_build: str = "",
        device: str = "",
        prefill_chunk_tokens: int = 0,
    ) -> Space:
        """Binds a spec and one of its shards.

        `plan_shapes` and `overlap` say what the engine can execute; ranks that give the same
        `engine_id` share the leases of their requests. Measured costs are kept by model,
        revision, `engine_build` and `device`; prompts are computed in calls of
        `prefill_chunk_tokens`.
        """
        space = Space(
            self._link, self._executor, spec, tenant, shard, engine_id, plan_shapes, overlap,
            engine_build, device, prefill_chunk_tokens,
        )  # fmt: skip
        self._link.attach(space)
        self._link.start_background()
        return space

    def status(self, with_spaces: bool = False, with_tenants: bool = False) -> pb.StatusResponse:
        """The daemon's state; needs the admin role."""
        return self.admin.status(with_spaces, with_tenants)

    @property
    def available(self) -> bool:
        """Whether calls go through at the moment."""
        return self._link.available

    @property
    def role(self) -> str:
        """What the daemon lets this client do: `engine` or `admin`."""
        return str(self._link.session().info.role)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Tenants that this client may attach to."""
        return tuple(self._link.session().info.tenants)

    def keep(self) -> float:
        """Does what the background thread would; answers with the seconds until it is due again."""
        return self._link.step()

    def close(self) -> None:
        """Finishes the put under way, cancels later ones and ends the session; idempotent."""
        if self._link.is_inherited:
            return
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._link.close()

    def __enter__(self) -> KVClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"KVClient({self._address!r}, {self._link.state.value})"
