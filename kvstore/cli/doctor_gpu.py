"""Looks of `kvstore doctor` at the GPUs that tier hbm is to be in."""

from __future__ import annotations

from kvstore.cli.findings import FAIL, OK, WARN, Finding
from kvstore.core.config import Config, HbmSection
from kvstore.core.config_hbm import device_bytes, device_uuids
from kvstore.core.sizes import format_bytes

CHECK = "GPU"


def gpu(config: Config) -> list[Finding]:
    """Whether configured GPUs are there, with room, and read pools at full speed; or nothing."""
    hbm = config.tiers.hbm
    if hbm.size is None:
        return []
    return [_look(hbm, uuid) for uuid in device_uuids(hbm)]


def _look(hbm: HbmSection, uuid: str) -> Finding:
    from kvstore.cuda.device import Device
    from kvstore.cuda.driver import CudaError, CudaUnavailable

    key = "devices" if hbm.devices else "device"
    try:
        device = Device(uuid)
        free = device.free_bytes()
    except (CudaUnavailable, CudaError) as error:
        fix = f"install the driver, correct tiers.hbm.{key}, or remove tiers.hbm"
        return Finding(CHECK, FAIL, str(error), fix)
    found, size = f"{device.uuid} has {format_bytes(free)} free", device_bytes(hbm)
    if free < size:
        return Finding(CHECK, FAIL, found, f"lower tiers.hbm.size, {hbm.size}")
    wanted = size + (int(hbm.staging_bytes) if hbm.share == "copy" else 0)
    if free < wanted:
        fix = f"with device staging it takes {format_bytes(wanted)}; lower tiers.hbm.staging_bytes"
        return Finding(CHECK, WARN, found, fix)
    if not device.driver.has_batch:
        fix = "install a driver of CUDA 12.8 or newer: this one copies range by range"
        return Finding(CHECK, WARN, found, fix)
    return Finding(CHECK, OK, found)
