"""Rules of the tier in a GPU's memory. Whether the GPU is there is seen when it is opened."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.core.config import Config

HBM_BYTES_MIN = 1 << 20
DEVICE = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def check_hbm(config: Config) -> None:
    """Raises ConfigError for the first rule that `tiers.hbm` breaks."""
    hbm = config.tiers.hbm
    if hbm.device and not DEVICE.fullmatch(hbm.device):
        raise ConfigError(
            f"tiers.hbm.device is {hbm.device!r}; pass a UUID such as nvidia-smi -L prints, GPU-..."
        )
    for name in ("size", "staging_bytes_per_session", "staging_bytes"):
        size = getattr(hbm, name)
        if size is not None and size < HBM_BYTES_MIN:
            raise ConfigError(f"tiers.hbm.{name} is {size}; pass 1MiB or more")
    if hbm.staging_bytes < hbm.staging_bytes_per_session:
        raise ConfigError(
            "tiers.hbm.staging_bytes is below tiers.hbm.staging_bytes_per_session; raise it"
        )
    if hbm.size is None:
        return
    isolated = [tenant.name for tenant in config.tenants if tenant.isolated]
    if hbm.share == "in_place" and isolated:
        raise ConfigError(
            f"tiers.hbm.share is 'in_place', which shows engines all blocks in it, and tenant "
            f"{isolated[0]!r} is isolated; use share = 'copy'"
        )
