"""PyTorch's training, in which peers differ by how the model is wrapped."""

from __future__ import annotations

from typing import Any

import torch

from bench.peers.training.workload import Workload


def build_model(workload: Workload) -> Any:
    """The transformers model in fp32, with the weights that all contenders begin with."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(workload.seed)
    return AutoModelForCausalLM.from_config(workload.make_model_config()).train()


class TorchPeer:
    """A model and torch's fused AdamW, for every micro-batch: forward(), backward(), step()."""

    def __init__(self, model: Any, workload: Workload, autocast: bool = False) -> None:
        """`model`, as build_model() makes it, may be wrapped; `autocast`: it computes in bf16."""
        self.model = model
        self.params: int = sum(parameter.numel() for parameter in model.parameters())
        self._autocast = autocast
        self._clip = workload.clip
        self._accumulate = workload.accumulate
        self._done = 0  # micro-batches of this step
        self.optimizer = torch.optim.AdamW(
            _param_groups(model, workload.weight_decay),
            lr=workload.lrs[0],
            betas=workload.betas,
            fused=True,
        )

    @property
    def exchanges(self) -> bool:
        """Whether this micro-batch is its step's last, in which ranks average gradients."""
        return self._done == self._accumulate - 1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._autocast):
            loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._accumulate).backward()

    def step(self, lr: float, last: bool) -> None:
        self._done += 1
        if not last:
            return
        self._done = 0
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self._clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _param_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
