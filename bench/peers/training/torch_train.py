"""Plain PyTorch with everything in memory.

usage: python -m bench.peers.training.torch_train WORKLOAD.json RESULT.json bf16|autocast|fp32

bf16 keeps weights and moments in bf16 and has no master; autocast keeps fp32 weights and moments
and computes in bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from bench.peers.training.measure import measure, write_result
from bench.peers.training.torch_peer import TorchPeer, build_model
from bench.peers.training.workload import Workload


def model_in(mode: str, workload: Workload) -> Any:
    """The model with its weights in the mode's dtype."""
    model = build_model(workload)
    return model.bfloat16() if mode == "bf16" else model


def require_mode(mode: str) -> None:
    """Raises ValueError for one that does not exist."""
    if mode not in ("bf16", "autocast", "fp32"):
        raise ValueError(f"mode must be bf16, autocast or fp32, got {mode!r}")


def main(argv: list[str]) -> int:
    workload_path, result_path, mode = argv
    require_mode(mode)
    workload = Workload.read(Path(workload_path))
    torch.set_num_threads(workload.threads)
    peer = TorchPeer(model_in(mode, workload), workload, mode == "autocast")
    result = measure(peer, workload)
    result |= {"params": peer.params, "dtype": mode, "policy": "in memory"}
    write_result(Path(result_path), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
