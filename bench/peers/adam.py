"""One flat parameter updated by torch's fused AdamW or DeepSpeedCPUAdam. A peer of bench.adam (see
serve.py).

Kinds: "torch fp32" and "torch bf16", moments in the parameter's dtype and no master; "deepspeed
fp32", the bare kernel; "deepspeed bf16", the bare kernel on a bf16 parameter and gradient with fp32
moments and no master; "deepspeed step", what ZeRO-Offload does for a bf16 parameter: the gradient
is cast to fp32, the kernel updates an fp32 master, the master is cast to the parameter. Its passes
for unscaling and clipping are not in it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from bench.peers.serve import serve
from bench.peers.timing import huge_page_share, timed_rate
from bench.peers.world import deepspeed_module


class AdamPeer:
    """Set-up: {"numel", "threads", "kind", "repeats"}. All arrays are allocated once."""

    def __init__(self, setup: dict[str, Any]) -> None:
        library, kind = setup["kind"].split()
        self.info: dict[str, Any] = {"torch": torch.__version__}
        make: Any = torch.optim.AdamW
        options: dict[str, Any] = {"fused": True}
        if library == "deepspeed":
            self.info["deepspeed"] = deepspeed_module().__version__
            make = deepspeed_module("deepspeed.ops.adam").DeepSpeedCPUAdam
            options = {"adamw_mode": True, "fp32_optimizer_states": True}
        torch.set_num_threads(setup["threads"])
        torch.manual_seed(0)
        self._numel: int = setup["numel"]
        self._repeats: int = setup["repeats"]
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        self._param = torch.nn.Parameter(torch.randn(self._numel).to(dtype))
        self._grad = torch.randn(self._numel).to(dtype)
        self._param.grad = self._grad
        common = {"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.01}
        self._optimizer = make([self._param], **common, **options)
        self._update = self._optimizer.step
        if kind == "step":
            self._param16 = self._param.detach().bfloat16()
            self._grad16 = self._grad.bfloat16()
            self._update = self._whole_step
        self._update()
        self.info["huge_page_share"] = huge_page_share()

    def _whole_step(self) -> None:
        self._grad.copy_(self._grad16)
        self._optimizer.step()
        self._param16.copy_(self._param.detach())

    def sample(self, _: dict[str, Any]) -> dict[str, float]:
        return timed_rate(self._update, self._numel, self._repeats)


if __name__ == "__main__":
    sys.exit(serve(AdamPeer))
