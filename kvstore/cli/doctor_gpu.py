"""Looks of `kvstore doctor` at the GPU that tier hbm is to be in."""

from __future__ import annotations

from kvstore.cli.findings import FAIL, OK, WARN, Finding
from kvstore.core.config import Config
from kvstore.core.sizes import format_bytes

CHECK = "GPU"


def gpu(config: Config) -> list[Finding]:
    """Whether the configured GPU is there, with room, and reads pools at full speed; or nothing."""
    hbm = config.tiers.hbm
    if hbm.size is None:
        return []
    from kvstore.cuda.device import Device
    from kvstore.cuda.driver import CudaError, CudaUnavailable

    try:
        device = Device(hbm.device)
        free = device.free_bytes()
    except (CudaUnavailable, CudaError) as error:
        fix = "install the driver, correct tiers.hbm.device, or remove tiers.hbm"
        return [Finding(CHECK, FAIL, str(error), fix)]
    found = f"{device.uuid} has {format_bytes(free)} free"
    if free < hbm.size:
        return [Finding(CHECK, FAIL, found, f"lower tiers.hbm.size, {hbm.size}")]
    wanted = int(hbm.size) + (int(hbm.staging_bytes) if hbm.share == "copy" else 0)
    if free < wanted:
        fix = f"with device staging it takes {format_bytes(wanted)}; lower tiers.hbm.staging_bytes"
        return [Finding(CHECK, WARN, found, fix)]
    if not device.driver.has_batch:
        fix = "install a driver of CUDA 12.8 or newer: this one copies range by range"
        return [Finding(CHECK, WARN, found, fix)]
    return [Finding(CHECK, OK, found)]
