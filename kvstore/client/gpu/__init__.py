"""The engine's side of a GPU: blocks straight into its memory and out of it. Needs a CUDA driver.

Nothing of it is loaded by `kvstore.client`; a host without a GPU never imports this.
"""

from kvstore.client.gpu.calibration import Calibration
from kvstore.client.gpu.engine import EngineSide, GpuSide
from kvstore.client.gpu.loading import Load
from kvstore.client.gpu.memory import EngineMemory, Parts, Stage
from kvstore.client.gpu.share import InPlace
from kvstore.cuda.device import Device, Stream

__all__ = [
    "Calibration",
    "Device",
    "EngineMemory",
    "EngineSide",
    "GpuSide",
    "InPlace",
    "Load",
    "Parts",
    "Stage",
    "Stream",
]
