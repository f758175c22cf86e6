"""The engine's side of a GPU: blocks straight into its memory and out of it. Needs a CUDA driver.

Nothing of it is loaded by `kvstore.client`; a host without a GPU never imports this.
"""

from kvstore.client.gpu.calibration import Calibration
from kvstore.client.gpu.engine import EngineSide, GpuSide
from kvstore.client.gpu.loading import Load, external
from kvstore.client.gpu.memory import EngineMemory, Parts, Stage
from kvstore.client.gpu.share import InPlace
from kvstore.client.gpu.taking import Taken, Taker
from kvstore.cuda.device import Device, Event, Stream
from kvstore.cuda.driver import CudaError, CudaUnavailable

__all__ = [
    "Calibration",
    "CudaError",
    "CudaUnavailable",
    "Device",
    "EngineMemory",
    "EngineSide",
    "Event",
    "GpuSide",
    "InPlace",
    "Load",
    "Parts",
    "Stage",
    "Stream",
    "Taken",
    "Taker",
    "external",
]
