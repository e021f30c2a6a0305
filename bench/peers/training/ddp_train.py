"""PyTorch's DistributedDataParallel: every rank holds all state and averages the gradients.

usage: python -m bench.peers.training.ddp_train WORKLOAD.json RESULT.json bf16|autocast|fp32

Runs as one of several ranks. The modes, and the arithmetic of a rank, are torch_train's.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.peers.training.measure import measure, write_result
from bench.peers.training.torch_peer import TorchPeer
from bench.peers.training.torch_train import model_in, require_mode
from bench.peers.training.workload import Workload
from bench.peers.world import joined


class DdpPeer(TorchPeer):
    """torch_train's training, with the gradients' mean over the ranks."""

    def __init__(self, workload: Workload, mode: str) -> None:
        # Gradients in the buckets that are sent, not beside them.
        model = DistributedDataParallel(model_in(mode, workload), gradient_as_bucket_view=True)
        super().__init__(model, workload, mode == "autocast")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with self._exchange():
            return super().forward(tokens)

    def backward(self, loss: torch.Tensor) -> None:
        with self._exchange():
            super().backward(loss)

    def _exchange(self) -> contextlib.AbstractContextManager[None]:
        """Around what may send gradients."""
        if self.exchanges:
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
