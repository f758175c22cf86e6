"""torch's work in streams that `kvstore.client.gpu` made, and its devices by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from kvstore.client.gpu import Stream


def device_uuid(device: Any) -> str:
    """The name of torch's GPU as `Device` takes it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device.index or 0).uuid}"


def capability_of(device: Any) -> str:
    """The kind of GPU, such as sm90."""
    import torch

    if device.type == "cpu":
        return "none"
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))


def on_stream(device: Any, stream: Stream) -> Any:
    """A context in which torch's work on the device is the stream's."""
    if device.type == "cpu":
        stream.synchronize()  # torch works at once here
        return nullcontext()
    import torch

    handle = int(stream.handle.value or 0)
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=device))


def sent_to(device: Any, numbers: np.ndarray) -> Any:
    """The numbers as a tensor there; the processor does not wait for the stream they go in."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    if device.type != "cpu":
        # From memory that is not pinned the driver may first wait for all work of the stream.
        # torch keeps what it pinned until the copy is over.
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor
