"""Plain PyTorch with everything in memory.

usage: python -m bench.peers.torch_train WORKLOAD.json RESULT.json bf16|autocast

bf16 keeps weights and moments in bf16 and has no master; autocast keeps fp32 weights and moments
and computes in bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from bench.peers.measure import measure, write_result
from bench.peers.workload import Workload


class TorchPeer:
    """A transformers model and torch's fused AdamW."""

    def __init__(self, workload: Workload, mode: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(workload.seed)
        model = AutoModelForCausalLM.from_config(workload.make_model_config()).train()
        self.model = model.bfloat16() if mode == "bf16" else model
        self.params = sum(parameter.numel() for parameter in self.model.parameters())
        self._autocast = mode == "autocast"
        self._clip = workload.clip
        self._accumulate = workload.accumulate
        self._optimizer = torch.optim.AdamW(
            param_groups(self.model, workload.weight_decay),
            lr=workload.lrs[0],
            betas=workload.betas,
            fused=True,
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._autocast):
            loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._accumulate).backward()

    def step(self, lr: float, last: bool) -> None:
        if not last:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()


def param_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def require_mode(mode: str) -> None:
    """Raises ValueError for one that TorchPeer does not have."""
    if mode not in ("bf16", "autocast"):
        raise ValueError(f"mode must be bf16 or autocast, got {mode!r}")


def main(argv: list[str]) -> int:
    workload_path, result_path, mode = argv
    require_mode(mode)
    workload = Workload.read(Path(workload_path))
    torch.set_num_threads(workload.threads)
    peer = TorchPeer(workload, mode)
    result = measure(peer, workload)
    result |= {"params": peer.params, "dtype": mode, "policy": "in memory"}
    write_result(Path(result_path), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
