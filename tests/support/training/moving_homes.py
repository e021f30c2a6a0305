"""A training whose homes move between an emulated device, RAM and the disk."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import hetero
from offload.memory.tiers import Tier
from tests.support.training.loops import batches, tiny_gpt2

CHUNK = 4096
STEPS = 5
LEAST, MOST = 500 << 10, 8 << 20  # of RAM
FEW, SOME, MANY = 200 << 10, 1200 << 10, 8 << 20  # of DEVICE: slots, some chunks, and all
RULES = {
    "adamw": hetero.HybridAdam,
    "lion": hetero.HybridLion,
    "sgd": partial(hetero.HybridSGD, momentum=0.9, dampening=0.5),
}


class Training:
    """A training of which a test makes one step after the other, of some micro-batches."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, accumulate: int = 1) -> None:
        self.model, self.optimizer = model, optimizer
        self.engine = optimizer.engine
        self.accumulate = accumulate
        self.data = iter(batches(STEPS * accumulate))
        self.made = 0
        self.found: list[Any] = []

    @property
    def on_device(self) -> int:
        return self.engine.placement.param.count(Tier.DEVICE)

    def forward(self) -> torch.Tensor:
        tokens = next(self.data)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.found.append(loss.detach().clone())
        return loss / self.accumulate

    def backward(self) -> None:
        self.optimizer.backward(self.forward())

    def update(self) -> None:
        self.found.append(hetero.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.made += 1

    def step(self) -> None:
        for _ in range(self.accumulate):
            self.backward()
        self.update()

    def finish(self) -> list[torch.Tensor]:
        while self.made < STEPS:
            self.step()
        self.found += hetero.masters(self.model.parameters())
        for param in self.model.parameters():
            with hetero.gathered(param):
                self.found.append(param.detach().clone())
        ledger = self.engine.ledger
        self.engine.close()
        assert set(ledger.in_use_bytes.values()) == {0}
        return self.found


def start(path: Path | None, rule: str = "adamw", accumulate: int = 1, **options: Any) -> Training:
    """The training of a tiny model; without `options` on an emulated device."""
    torch.manual_seed(0)
    given = {"placement_policy": "auto", "dtype": "bf16", "chunk_numel": CHUNK}
    given |= {"backend": "emulated", "device_memory": SOME, "host_memory": MOST}
    given |= {} if path is None else {"nvme_path": str(path)}
    with hetero.ZeroInitContext(**{**given, **options}):
        model = tiny_gpt2()
    optimizer = RULES[rule](model.parameters(), lr=1e-2, weight_decay=0.1)
    return Training(*hetero.initialize(model, optimizer), accumulate)


@cache
def reference(rule: str = "adamw", accumulate: int = 1, **options: Any) -> list[torch.Tensor]:
    """The same training in RAM."""
    plain: dict[str, Any] = {"backend": "cpu", "placement_policy": "cpu"}
    plain |= {"device_memory": None, **options}
    return start(None, rule, accumulate, **plain).finish()


def check_budgets(engine: hetero.Engine) -> None:
    """The budgets hold, and each chunk is on the device with all of its state, or not at all."""
    for tier in ("device", "host"):
        assert engine.ledger.in_use_bytes[tier] <= (engine.ledger.budget_bytes[tier] or 0)
    placement = engine.placement
    for chunk in engine.layout.chunks:
        homes = {
            placement.param[chunk.id],
            placement.grad[chunk.id],
            placement.optim_state[chunk.id],
        }
        assert homes == {Tier.DEVICE} or Tier.DEVICE not in homes
