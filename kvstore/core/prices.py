"""`Prices`: what memory, disk and GPU time cost, from the `[prices]` table of a TOML file."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from kvstore.core.errors import InvalidRequest
from kvstore.core.section import Section

HOURS_A_MONTH = 730.0
GIB, TERABYTE = 1 << 30, 10**12


class Prices(Section, frozen=True):
    """Prices in one currency; the defaults are round figures of rented machines in dollars.

    A drive of 3.84 TB for 400 that may be written once a day for five years costs 0.057 a terabyte.
    A GPU with 80 GB costs 24 a month for each GiB, if its memory is all that it is rented for.
    """

    gpu_hour: float = 2.5
    host_gib_month: float = 2.0
    disk_gib_month: float = 0.1
    disk_terabyte_written: float = 0.057
    hbm_gib_month: float = 24.0

    @property
    def gpu_second(self) -> float:
        return self.gpu_hour / 3600

    @property
    def written_byte(self) -> float:
        """What writing a byte to disk costs."""
        return self.disk_terabyte_written / TERABYTE

    def month(
        self, host_bytes: float, disk_bytes: float = 0.0, written_bytes_a_second: float = 0.0,
        hbm_bytes: float = 0.0,
    ) -> float:  # fmt: skip
        """What tiers of these sizes cost a month, the wear of the disk included."""
        written = written_bytes_a_second * HOURS_A_MONTH * 3600 / TERABYTE
        return (
            self.host_gib_month * host_bytes / GIB
            + self.disk_gib_month * disk_bytes / GIB
            + self.disk_terabyte_written * written
            + self.hbm_gib_month * hbm_bytes / GIB
        )

    def worth(self, busy_share: float) -> float:
        """What a month of so many GPUs costs: 0.5 is half of one's time."""
        return self.gpu_hour * HOURS_A_MONTH * busy_share

    def fault(self) -> str:
        """The first price that is none, with the fix; empty if all are."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                return f"prices.{name} is {value}; pass 0 or more"
        return ""


class _File(msgspec.Struct, frozen=True):
    prices: Prices = Prices()


def load_prices(path: Path | None) -> Prices:
    """The prices in a file, such as the daemon's configuration; raises InvalidRequest."""
    if path is None:
        return Prices()
    try:
        prices = msgspec.toml.decode(path.read_bytes(), type=_File).prices
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = str(error)[:1].lower() + str(error)[1:]
        known = ", ".join(Prices.__struct_fields__)
        raise InvalidRequest(
            f"{path} has no usable [prices]: {what}; it may have {known}, each a number"
        ) from None
    fault = prices.fault()
    if fault:
        raise InvalidRequest(f"{path}: {fault}")
    return prices
