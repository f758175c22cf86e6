"""`Demoting`: the part of `Residency` that says what is written to disk, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.policies.actions import Action, Demote
from kvstore.policies.admission import Admission
from kvstore.policies.demotion import DemotionQueue
from kvstore.policies.hearing import Hearing
from kvstore.policies.index import Run


class Demoting(Hearing):
    """Keeps the queue of what is due, which listens to the index through `Residency`."""

    _demotions: DemotionQueue

    def __init__(self) -> None:
        super().__init__()
        self.on_action: Callable[[Action], None] | None = None

    def demote_above(self, pool: str, watermark_bytes: int) -> None:
        """From so many bytes used on, host `pool` has its coldest blocks written to disk."""
        self._demotions.watermarks[pool] = watermark_bytes
        self._forget_orders()
        self._record("demote_above", pool, watermark_bytes)

    def set_prices(self, gpu_second: float, written_byte: float, disk_bytes: int) -> None:
        """Writes only what is worth it from now on, at these prices and with a disk of this size.

        Until then, everything that is due is written.
        """
        self._record("set_prices", gpu_second, written_byte, disk_bytes)
        if self._demotions.admission is None:
            self._demotions.admission = Admission(self.context)
        self._demotions.admission.set_prices(gpu_second, written_byte, disk_bytes)

    @property
    def passed_blocks(self) -> int:
        """Blocks that were due for the disk and not worth it, so far."""
        return self._demotions.passed_blocks

    def demotions(
        self, pool: str, byte_count: int, busy: float = 0.0, spare: float = 0.0
    ) -> Iterator[Demote]:
        """Yields what of host `pool` to write to disk now, parents first, about `byte_count`.

        Mark each (`PrefixIndex.begin_move`) or stop before asking for the next. What is worth least
        is passed over: of what is worth a write the share that finds the link `busy` (0 to 1), and
        more than `spare` bytes a second in the long run; 0 is no limit.
        """
        self._record("demotions", pool, byte_count, busy, spare)
        for demote in self._demotions.take(pool, byte_count, busy, spare):
            if self.on_action is not None:
                self.on_action(demote)
            yield demote

    def copy_lost(self, run: Run) -> None:
        """Blocks of `run` did not get to disk, or were no good there: they are due again.

        Not so what the disk had no room for any more: with a small disk, that would never end.
        """
        self._demotions.offer(run)

    def _forget_orders(self) -> None:
        """There are other policies than before."""
        raise NotImplementedError
