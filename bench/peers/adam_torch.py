"""torch's fused AdamW on one flat parameter. A peer of bench.adam (see serve.py)."""

from __future__ import annotations

import sys
from typing import Any

import torch

from bench.peers.adam_timing import huge_page_share, timed_rate
from bench.peers.serve import serve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TorchPeer:
    """Set-up: {"numel", "threads", "kind": "fp32" or "bf16", "repeats"}.

    Moments have the parameter's dtype; bf16 has no master.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        torch.set_num_threads(setup["threads"])
        torch.manual_seed(0)
        dtype = DTYPES[setup["kind"]]
        self._repeats: int = setup["repeats"]
        self._param = torch.nn.Parameter(torch.randn(setup["numel"]).to(dtype))
        self._param.grad = torch.randn(setup["numel"]).to(dtype)
        self._optimizer = torch.optim.AdamW(
            [self._param], lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01, fused=True
        )
        self._optimizer.step()
        self.info: dict[str, Any] = {
            "torch": torch.__version__,
            "huge_page_share": huge_page_share(),
        }

    def sample(self, _: dict[str, Any]) -> dict[str, float]:
        return timed_rate(self._optimizer.step, self._param.numel(), self._repeats)


if __name__ == "__main__":
    sys.exit(serve(TorchPeer))
