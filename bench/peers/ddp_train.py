"""PyTorch's DistributedDataParallel: every rank holds all state and averages the gradients.

usage: python -m bench.peers.ddp_train WORKLOAD.json RESULT.json bf16|autocast

Runs as one of several ranks. The modes, and the arithmetic of a rank, are torch_train's.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.peers.measure import measure, write_result
from bench.peers.torch_train import TorchPeer, require_mode
from bench.peers.workload import Workload
from bench.peers.world import joined


class DdpPeer(TorchPeer):
    """TorchPeer's training, with the gradients' mean over the ranks."""

    def __init__(self, workload: Workload, mode: str) -> None:
        super().__init__(workload, mode)
        # Gradients in the buckets that are sent, not beside them.
        self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._micro_batches = 0  # of this step

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self._micro_batches += 1
        with self._exchange():
            return super().forward(tokens)

    def backward(self, loss: torch.Tensor) -> None:
        with self._exchange():
            super().backward(loss)

    def step(self, lr: float, last: bool) -> None:
        super().step(lr, last)
        if last:
            self._micro_batches = 0

    def _exchange(self) -> contextlib.AbstractContextManager[None]:
        """Gradients are sent in the last micro-batch of a step alone."""
        if self._micro_batches == self._accumulate:
            return contextlib.nullcontext()
        no_sync: contextlib.AbstractContextManager[None] = self.model.no_sync()
        return no_sync


def main(argv: list[str]) -> int:
    workload_path, result_path, mode = argv
    require_mode(mode)
    workload = Workload.read(Path(workload_path))
    torch.set_num_threads(workload.threads)
    with joined():
        write_result(Path(result_path), run(workload, mode))
    return 0


def run(workload: Workload, mode: str) -> dict[str, Any]:
    """The figures of a training."""
    peer = DdpPeer(workload, mode)
    result = measure(peer, workload)
    return result | {"params": peer.params, "dtype": mode, "policy": "in memory of every rank"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
