"""Rules of the tier in a GPU's memory. Whether the GPU is there is seen when it is opened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.core.config import Config, HbmSection

HBM_BYTES_MIN = 1 << 20
DEVICE = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def check_hbm(config: Config) -> None:
    """Raises ConfigError for the first rule that `tiers.hbm` breaks."""
    hbm = config.tiers.hbm
    _check_devices(hbm)
    for name in ("size", "staging_bytes_per_session", "staging_bytes"):
        size = getattr(hbm, name)
        if size is not None and size < HBM_BYTES_MIN:
            raise ConfigError(f"tiers.hbm.{name} is {size}; pass 1MiB or more")
    if hbm.size is not None and device_bytes(hbm) < HBM_BYTES_MIN:
        raise ConfigError(
            f"tiers.hbm.size is {hbm.size} for {len(hbm.devices)} GPUs together; pass 1MiB or more "
            "for each"
        )
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


def device_uuids(hbm: HbmSection) -> Sequence[str]:
    """GPUs that the tier is in, by UUID; an empty one is the first there is."""
    return hbm.devices or (hbm.device,)


def device_bytes(hbm: HbmSection) -> int:
    """What the tier takes of each of them."""
    return int(hbm.size or 0) // len(device_uuids(hbm))


def _check_devices(hbm: HbmSection) -> None:
    if hbm.device and hbm.devices:
        raise ConfigError("tiers.hbm has both device and devices; name all GPUs in devices")
    for key, uuids in (("device", (hbm.device,)), ("devices", hbm.devices)):
        for uuid in uuids:
            if not DEVICE.fullmatch(uuid) and (uuid or key == "devices"):
                raise ConfigError(
                    f"tiers.hbm.{key} is {uuid!r}; pass a UUID such as nvidia-smi -L prints, "
                    "GPU-..."
                )
    if len(set(hbm.devices)) < len(hbm.devices):
        raise ConfigError("tiers.hbm.devices names a GPU twice; name each once")
