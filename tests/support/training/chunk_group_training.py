"""Training whose set of trained parameters changes, by hetero and by the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import hetero
from tests.support.ranks.rank_training import Experts, finish
from tests.support.training.plain_adam import OPTIONS, PlainAdam

STEPS = 5
CHANGES_AT = 2  # the step before which a script's change happens
KEPT = ["norm.*", "router.weight"]
SCRIPTS = ["mixed", "unfreeze", "unfreeze-mixed", "add-frozen", "add-new"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Mixed(nn.Module):
    """A norm and a router that may be in fp32, and a place for another module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.norm = nn.LayerNorm(96)
        self.router = nn.Linear(96, 4, bias=False)
        self.last = nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        chosen = self.router(x.to(self.router.weight.dtype)).softmax(-1)[..., :1]
        x = self.last(x) * chosen.to(x.dtype)
        return x + self.extra(x) if hasattr(self, "extra") else x


def build(script: str) -> Mixed:
    """The model as it begins."""
    torch.manual_seed(0)
    model = Mixed()
    if script.startswith("unfreeze") or script == "add-frozen":
        model.first.requires_grad_(False)
    if script == "unfreeze-most":
        model.requires_grad_(False)
        model.last.bias.requires_grad_(True)
    if script == "unfreeze-mixed":
        model.norm.requires_grad_(False)
    return model


def change(script: str, model: Mixed) -> list[nn.Parameter]:
    """What happens in the middle; parameters that the optimizer must get."""
    if script.startswith("unfreeze"):
        model.requires_grad_(True)
    if script == "add-frozen":
        model.first.requires_grad_(True)
        return list(model.first.parameters())
    if script == "add-new":
        torch.manual_seed(7)
        model.extra = nn.Linear(64, 64)
        return list(model.extra.parameters())
    return []


def is_mixed(script: str) -> bool:
    """Whether the script keeps some parameters in fp32."""
    return "mixed" in script


def inputs(rank: int, step: int) -> torch.Tensor:
    """A batch."""
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In fp32."""
    loss: torch.Tensor = (model(x).float() - 1).square().mean()
    return loss


@dataclass
class Run:
    """What a training run gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    chunk_groups: int = 1
    on_disk: bool = False  # anything of the last chunk group
    peak: int = 0


def train(rank: int, world: int, script: str, options: dict[str, Any]) -> Run:
    """By hetero, on this rank."""
    if is_mixed(script):
        options = {"keep_fp32": KEPT} | options
    with hetero.ZeroInitContext(rank_timeout_s=60.0, **options):
        model = build(script)
    given = [p for p in model.parameters() if p.requires_grad or script != "add-frozen"]
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(given, **OPTIONS))
    engine = optimizer.engine
    run = Run()
    for step in range(STEPS):
        if step == CHANGES_AT:
            new = change(script, model)
            if new:
                optimizer.add_param_group({"params": new})
        loss = loss_of(model, inputs(rank, step))
        loss.backward()
        run.losses.append(loss.item())
        del loss
        assert sum(g.params.copies.pinned() for g in engine.chunk_groups) == 0
        run.norms.append(hetero.clip_grad_norm_(model.parameters(), 1e30).item())
        optimizer.step()
        optimizer.zero_grad()
        engine.synchronize()
    names = dict(model.named_parameters())
    run.masters = dict(zip(names, hetero.masters(names.values()), strict=True))
    state = optimizer.state_dict()["state"]
    run.states = [state[i] for i in sorted(state)]
    whole = model.state_dict()
    for name, param in names.items():
        assert torch.equal(whole[name].float(), run.masters[name].to(param.dtype).float()), name
    run.chunk_groups = len(engine.chunk_groups)
    last = engine.chunk_groups[-1]
    run.on_disk = last.disk is not None
    run.peak = engine.ledger.peak_bytes["host"]
    engine.close()
    return run


def train_plain(script: str, dtype: str, world: int = 1) -> list[Run]:
    """By plain PyTorch, all ranks in one: every rank's gradients are made in turn, and averaged."""
    compute = DTYPES[dtype]
    model = build(script)
    optimizer = PlainAdam()

    def take_in() -> None:
        """What is to be trained and is not yet; parameters get their dtypes."""
        for name, param in model.named_parameters():
            if param.requires_grad and param not in optimizer.masters:
                optimizer.add(param)
            kept = is_mixed(script) and name in ("norm.weight", "norm.bias", "router.weight")
            param.data = param.data.to(torch.float32 if kept else compute)

    take_in()
    runs = [Run() for _ in range(world)]
    for step in range(STEPS):
        if step == CHANGES_AT:
            change(script, model)
            take_in()
        found: list[dict[nn.Parameter, torch.Tensor]] = []
        for rank, run in enumerate(runs):
            loss = loss_of(model, inputs(rank, step).to(compute))
            loss.backward()
            run.losses.append(loss.item())
            found.append({p: p.grad for p in model.parameters() if p.grad is not None})
            optimizer.zero_grad()
        for p, first in found[0].items():
            total = first.float()
            for other in found[1:]:
                total = total + other[p].float()
            p.grad = (total / world).to(first.dtype)
        norm = optimizer.norm()
        optimizer.step()
        optimizer.zero_grad()
        for run in runs:
            run.norms.append(norm)
    for run in runs:
        run.masters = optimizer.whole(model)
        run.states = [master.state for master in optimizer.masters.values()]
    return runs


def assert_same(run: Run, expected: Run) -> None:
    """Every bit; the norm, the same sum in another order, as fp32."""
    assert run.losses == expected.losses
    assert len(set(run.losses)) > 1, "training moved"
    for found, norm in zip(run.norms, expected.norms, strict=True):
        assert abs(found - norm) <= 2e-7 * norm
    assert list(run.masters) == list(expected.masters)
    for name, master in run.masters.items():
        assert torch.equal(master, expected.masters[name]), name


def uneven(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """Each rank uses another expert, of which one is kept in fp32, and a clipping norm."""
    torch.manual_seed(0)
    model = Experts(4)
    model, optimizer = hetero.initialize(
        model,
        hetero.HybridAdam(model.parameters(), lr=1e-2),
        **{"placement_policy": "cpu", "keep_fp32": ["experts.0.*"], "rank_timeout_s": 60.0}
        | options,
    )
    norms = []
    for step in range(STEPS):
        expert = (rank + step) % 4
        x = model.inner(inputs(rank, step).to(torch.bfloat16)).float()
        chosen = model.experts[expert]
        loss = chosen(x.to(chosen.weight.dtype)).float().square().mean()
        loss.backward()
        norms.append(hetero.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(norms), *finish(model, optimizer)]
