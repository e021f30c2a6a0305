"""OneFlow's document of ZeRO with hetero's imports, on each rank; and what plain PyTorch makes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hetero
from tests.support.compat.document import run_document

STEPS = 10
IMPORTS = {
    "for _ in range(100):": f"for _ in range({STEPS}):",
    "import oneflow as flow": "from hetero.compat import oneflow as flow",
    "from oneflow import nn": "from hetero.compat.oneflow import nn",
}


def run_on_a_rank(rank: int, world: int, enable: str) -> dict[str, Any]:
    """The document with a line that enables ZeRO; what the model has then, and infers."""
    torch.manual_seed(rank)  # (the first rank's weights count; each has data of its own)
    names = run_document("oneflow_zero.txt", IMPORTS, left_out=[enable])
    engine = names["optimizer"].engine
    model, flow = names["model"], names["flow"]

    class Inference(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    x = torch.ones(2, 256)
    found = {
        "weights": hetero.masters(model.parameters()),
        "inferred": [Inference()(x), model(x).detach()],
        "stage": engine.config.zero_stage,
    }
    dist.barrier()  # no rank closes while another one infers
    engine.close()
    return found


def expected() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Weights and inference of plain PyTorch over both ranks' data."""
    states = []
    models = []
    for rank in range(2):
        torch.manual_seed(rank)
        models.append(nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 10)))
        states.append(torch.get_rng_state())
    model = models[0]
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        sgd.zero_grad()
        for rank in range(2):
            torch.set_rng_state(states[rank])
            x = torch.randn(128, 256)
            states[rank] = torch.get_rng_state()
            y = torch.ones(128, dtype=torch.int64)
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
        sgd.step()
    return [p.detach() for p in model.parameters()], model(torch.ones(2, 256)).detach()
