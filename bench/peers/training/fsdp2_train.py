"""PyTorch's FSDP2: sharded state; each block is gathered before its forward and backward.

usage: python -m bench.peers.training.fsdp2_train WORKLOAD.json RESULT.json offload|fp32

Runs as one of several ranks. fp32 shards in RAM under CPUOffloadPolicy, which on a machine that
computes on the CPU copies nothing; compute in bf16 (offload) or fp32, gradients reduced in fp32.
Every rank builds the whole model before it is sharded, so that all contenders begin with the same
weights; a rank's training state is larger than that up to four ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from bench.peers.training.measure import measure, write_result
from bench.peers.training.torch_peer import TorchPeer, build_model
from bench.peers.training.workload import Workload
from bench.peers.world import joined

_COMPUTE = {"offload": torch.bfloat16, "fp32": torch.float32}


class Fsdp2Peer(TorchPeer):
    """A transformers model, sharded block by block, and torch's fused AdamW on the shards."""

    def __init__(self, workload: Workload, mode: str) -> None:
        model = _sharded(build_model(workload), workload.shard_ranks, _COMPUTE[mode])
        super().__init__(model, workload)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.model.set_requires_gradient_sync(self.exchanges)
        return super().forward(tokens)


def _sharded(model: Any, shard_ranks: int | None, compute: torch.dtype) -> Any:
    world_size = dist.get_world_size()
    shape = (world_size,) if shard_ranks is None else (world_size // shard_ranks, shard_ranks)
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", shape),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
        # Memory can be pinned only for an accelerator.
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    blocks = [
        block
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        for block in module
    ]
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def main(argv: list[str]) -> int:
    workload_path, result_path, mode = argv
    if mode not in _COMPUTE:
        raise ValueError(f"mode must be one of {', '.join(_COMPUTE)}, got {mode!r}")
    workload = Workload.read(Path(workload_path))
    torch.set_num_threads(workload.threads)
    with joined():
        write_result(Path(result_path), run(workload, mode))
    return 0


def run(workload: Workload, mode: str) -> dict[str, Any]:
    """The figures of a training."""
    peer = Fsdp2Peer(workload, mode)
    result = measure(peer, workload)
    policy = "fp32 shards, CPUOffloadPolicy"
    dtype = "fp32" if mode == "fp32" else "bf16"
    return result | {"params": peer.params, "dtype": dtype, "policy": policy}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Sharded tensors leave the connection's threads behind, which can abort the interpreter's end.
    sys.stdout.flush()
    os._exit(code)
