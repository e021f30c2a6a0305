"""DeepSpeed's optimizer step with its state in files. A peer of bench.step (see serve.py).

ZeRO-3 on one process of the CPU: bf16 parameters in RAM, fp32 master, momentum, variance and
gradients swapped by its pipelined optimizer swapper. Only engine.step() is timed. Forward and
backward of a chain of square layers on one row make the gradients; DeepSpeed's backward also
writes them to files, which is not in the time, and its step reads them, which is.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from bench.peers.serve import serve
from bench.peers.world import deepspeed_engine, start_deepspeed, zero3_config

# Parameters whose state is in RAM at a time. Its default of 1e9 would swap a model of this size in
# one part, with nothing to overlap.
SUB_GROUP_NUMEL = 50_000_000
# Each part has four tensors; one part is read ahead while one is updated and one written. With 5,
# as in its examples, a model of several parts fails by an assertion.
BUFFER_COUNT = 16


class DeepSpeedStep:
    """Set-up: {"params", "swap_folder", "threads"}. Request: {"steps"}, to take the mean of."""

    def __init__(self, setup: dict[str, Any]) -> None:
        torch.set_num_threads(setup["threads"])
        deepspeed = start_deepspeed()
        width, layers = chain_shape(setup["params"])
        sizes = {"buffer_count": BUFFER_COUNT, "sub_group_size": SUB_GROUP_NUMEL}
        self._engine, _ = deepspeed_engine(
            deepspeed,
            zero3_config({"lr": 1e-4}, nvme_path=setup["swap_folder"], **sizes),
            lambda: torch.nn.Sequential(
                *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
            ),
        )
        self._row = torch.full((1, width), 1.0, dtype=torch.bfloat16)
        self.info: dict[str, Any] = {
            "deepspeed": deepspeed.__version__,
            "params": layers * width * width,
            "sub_group_numel": SUB_GROUP_NUMEL,
            "buffer_count": BUFFER_COUNT,
        }

    def sample(self, request: dict[str, Any]) -> dict[str, float]:
        seconds = 0.0
        for _ in range(request["steps"]):
            self._engine.backward(self._engine(self._row).float().sum())
            begin_s = time.perf_counter()
            self._engine.step()
            seconds += time.perf_counter() - begin_s
        return {"step_s": seconds / request["steps"]}


def chain_shape(params: int) -> tuple[int, int]:
    """(width, layers) of square layers with about `params` parameters, of at most 2048 a side."""
    width = 2048
    while width > 64 and width * width * 16 > params:
        width //= 2
    return width, max(1, round(params / (width * width)))


if __name__ == "__main__":
    sys.exit(serve(DeepSpeedStep))
