"""A vLLM for processors whose connector takes its memory for a GPU's: `python vllm_gpu_host.py`.

The driver is the one without a GPU, whose device memory is this machine's, and it copies only when
it is waited for. Answers as `kvstore.engines.vllm.host` does; the file VLLM_GPU_HOST_SIDES has a
line for each worker that it has such a side in.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import fake_cuda
import torch

from kvstore.client.gpu import Device
from kvstore.engines.vllm import host, worker
from kvstore.engines.vllm.engine import rank_of
from kvstore.engines.vllm.gpu_worker import GpuWorkerSide


class HostGround:
    """vLLM's memory, and the driver's default stream, on which nothing is ever waiting."""

    def __init__(self) -> None:
        self.device = Device(driver=fake_cuda.fake_driver())

    def stream(self) -> int:
        return 0

    def memory(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty((rows, columns), dtype=torch.uint8)


class ForcedSide(GpuWorkerSide):
    """The side of a GPU over caches that lie on none."""

    def register(self, kv_caches: dict[str, Any]) -> None:
        rank = rank_of(self._config, self._settings, self._caches, kv_caches, on_gpu=True)
        self.use_on(rank, HostGround)
        assert self._mover is not None, "the driver without a GPU is there"
        with open(os.environ["VLLM_GPU_HOST_SIDES"], "a", encoding="utf-8") as sides:
            sides.write(f"{rank.shard} {rank.spec.layout}\n")


if __name__ == "__main__":
    os.environ["FAKE_CUDA_LAZY"] = "1"
    worker.worker_side = lambda config, settings: ForcedSide
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    host.serve(sys.stdin, answers)
