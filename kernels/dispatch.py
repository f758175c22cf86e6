"""Which code runs an operation, Triton's kernels or the reference, and for which chip."""

from __future__ import annotations

from functools import cache

import torch

BACKENDS = ("reference", "triton")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Chips whose settings are tuned and compile-checked; others use those of their nearest kin."""


def uses_triton(backend: str | None, device: torch.device) -> bool:
    """Whether `backend` is Triton; None means Triton on GPUs, the reference elsewhere.

    Raises ValueError for any other name.
    """
    if backend is None:
        return bool(device.type == "cuda")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; pass 'triton', 'reference' or None")
    return backend == "triton"


@cache
def target_of(device: torch.device) -> str:
    """The member of `TARGETS` whose settings fit a device, or "cpu" for Triton's interpreter."""
    if device.type != "cuda":
        return "cpu"
    if torch.version.hip:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return {8: "sm_80", 9: "sm_90"}.get(major, "sm_100" if major > 9 else "sm_80")


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for the CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
