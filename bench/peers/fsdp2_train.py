"""PyTorch's FSDP2: sharded state; each block is gathered before its forward and backward.

usage: python -m bench.peers.fsdp2_train WORKLOAD.json RESULT.json offload

Runs as one of several ranks. fp32 shards in RAM under CPUOffloadPolicy, which on a machine that
computes on the CPU copies nothing; bf16 compute, gradients reduced in fp32. Every rank builds the
whole model before it is sharded, so that all contenders begin with the same weights; a rank's
training state is larger than that up to four ranks.
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

from bench.peers.measure import measure, write_result
from bench.peers.torch_train import param_groups
from bench.peers.workload import Workload
from bench.peers.world import joined


class Fsdp2Peer:
    """A transformers model, sharded block by block, and torch's fused AdamW on the shards."""

    def __init__(self, workload: Workload) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(workload.seed)
        model = AutoModelForCausalLM.from_config(workload.make_model_config()).train()
        self.params = sum(parameter.numel() for parameter in model.parameters())
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            ),
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
        self._model: Any = fully_shard(model, **options)
        self._clip = workload.clip
        self._accumulate = workload.accumulate
        self._micro_batches = 0  # of this step
        self._optimizer = torch.optim.AdamW(
            param_groups(model, workload.weight_decay),
            lr=workload.lrs[0],
            betas=workload.betas,
            fused=True,
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self._micro_batches += 1
        # Gradients are reduced in the last micro-batch of a step alone.
        self._model.set_requires_gradient_sync(self._micro_batches == self._accumulate)
        loss: torch.Tensor = self._model(input_ids=tokens, labels=tokens).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._accumulate).backward()

    def step(self, lr: float, last: bool) -> None:
        if not last:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._clip > 0:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._micro_batches = 0


def main(argv: list[str]) -> int:
    workload_path, result_path, mode = argv
    if mode != "offload":
        raise ValueError(f"mode must be offload, got {mode!r}")
    workload = Workload.read(Path(workload_path))
    torch.set_num_threads(workload.threads)
    with joined():
        write_result(Path(result_path), run(workload))
    return 0


def run(workload: Workload) -> dict[str, Any]:
    """The figures of a training."""
    peer = Fsdp2Peer(workload)
    result = measure(peer, workload)
    policy = "fp32 shards, CPUOffloadPolicy"
    return result | {"params": peer.params, "dtype": "bf16", "policy": policy}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Sharded tensors leave the connection's threads behind, which can abort the interpreter's end.
    sys.stdout.flush()
    os._exit(code)
