"""A daemon with a disk, contexts restored from it, and where in memory attention reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemons import DaemonProcess

LIMITS = """
tiers.host.prefault = false
tiers.host.mlock = false
tiers.disk.size = "{disk}"
tiers.disk.reserve = "1MiB"
tiers.disk.endurance_dwpd = 0
tiers.disk.admission = "all"
tiers.disk.path = "{path}"
"""


def daemon_with_disk(path: Path, host: str = "16MiB", disk: str = "32MiB") -> DaemonProcess:
    """Not started yet; its disk tier is below `path`."""
    return DaemonProcess(host, LIMITS.format(disk=disk, path=path / "disk"))


def reboot(daemon: DaemonProcess) -> None:
    """All blocks are on disk, and on disk only, as after a reboot."""
    with daemon.client() as client:
        client.admin.flush()
    daemon.kill()
    daemon.lose_memory()
    daemon.start()


@contextmanager
def restored(daemon: DaemonProcess, spec: Any, tokens: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(context, match, views) of a client of its own, leased; checked at the end."""
    from kvstore.engines.in_place import context_of

    with daemon.client() as client:
        space = client.attach(spec)
        with space.lookup(tokens) as match:
            views = space.restore(match)
            yield context_of(views, spec), match, views
            match.check()


def sources(match: Any) -> set[str]:
    """Tiers that the plan loads from."""
    return {step.source for step in match.plan.steps} - {"recompute"}


class Reads:
    """Tensors that attention was called with: `record` stands in for one of its functions."""

    def __init__(self) -> None:
        self.pools: list[Any] = []

    def record(self, function: Any) -> Any:
        def call(q: Any, **named: Any) -> Any:
            names = ("k_pool", "v_pool", "k_scale", "v_scale")
            self.pools.append([named[name] for name in names if named[name] is not None])
            return function(q, **named)

        return call

    def within(self, folder: Path) -> list[bool]:
        """Of each call, whether all its keys and values are in read-only mappings of a folder."""
        ranges = list(_mapped(folder))
        return [all(any(_inside(t, *r) for r in ranges) for t in pools) for pools in self.pools]


def _mapped(folder: Path) -> Iterator[tuple[int, int]]:
    """Address ranges of this process's shared, read-only mappings of files in a folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_, path = line.split()
        if permissions == "r--s" and path.startswith(f"{folder}/"):
            start, stop = addresses.split("-")
            yield int(start, 16), int(stop, 16)


def _inside(tensor: Any, start: int, stop: int) -> bool:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.data_ptr() + (last + 1) * tensor.element_size()
    return bool(start <= tensor.data_ptr() and end <= stop)
