"""Training of a case, by hetero and by the oracle, and what is compared."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import hetero
from hetero.placement import Placement
from tests.smallest import smallest_host_memory
from tests.update_oracle import Hyper, update
from tests.zoo.case import Case, Where

STEPS = 5
SLOT_NUMEL = 4096
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# eps is large so that an update is a smooth function of the gradient, its slope at most lr / eps.
# With 1e-8 a gradient that is zero but for rounding (an attention's key bias) would make updates as
# large as any.
OPTIONS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4}


@dataclass
class Run:
    """What a training run gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    placement: Placement | None = None  # of a run by hetero


class PlainAdam:
    """The oracle's optimizer: hetero's documented update in numpy, on fp32 masters."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self.params = dict(model.named_parameters())
        self.masters: dict[str, np.ndarray] = {}
        self.states: dict[str, tuple[np.ndarray, ...]] = {}
        self.steps: dict[str, int] = {}
        for name, param in self.params.items():
            if not param.is_floating_point():
                continue
            if param.requires_grad:
                master = param.detach().float().numpy().reshape(-1).copy()
                self.masters[name] = master
                self.states[name] = (np.zeros_like(master), np.zeros_like(master))
                self.steps[name] = 0
            param.data = param.data.to(TORCH_DTYPES[dtype])

    def norm(self) -> float:
        """The 2-norm of all gradients."""
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        return math.sqrt(sum(g.double().square().sum().item() for g in grads))

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters that have gradients."""
        for name, param in self.params.items():
            if param.grad is None or not param.numel():
                continue
            self.steps[name] += 1
            hyper = Hyper(
                lr=OPTIONS["lr"],
                weight_decay=OPTIONS["weight_decay"],
                decoupled=True,
                beta1=OPTIONS["betas"][0],
                beta2=OPTIONS["betas"][1],
                eps=OPTIONS["eps"],
                step=self.steps[name],
            )
            grad = param.grad.float().numpy().reshape(-1)
            master, states = update("adam", self.masters[name], self.states[name], grad, hyper)
            self.masters[name], self.states[name] = master, states
            param.copy_(torch.from_numpy(master).view(param.shape))

    def zero_grad(self) -> None:
        """Clears all gradients."""
        for param in self.params.values():
            param.grad = None

    def whole(self) -> dict[str, torch.Tensor]:
        """Masters, and the values of what is not trained, in fp32."""
        return {
            name: torch.from_numpy(self.masters[name]).view(p.shape)
            if name in self.masters
            else p.detach().float()
            for name, p in self.params.items()
        }


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a batch in the compute dtype, as hetero gives them to the model."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(each, dtype) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(cast(each, dtype) for each in value)
    return value


def run_plain(case: Case, dtype: str, accumulate: int) -> Run:
    """Plain PyTorch in memory; only the update is hetero's, as documented."""
    torch.manual_seed(0)
    model = case.make()
    optimizer = PlainAdam(model, dtype)
    run = Run()
    for step in range(STEPS):
        for micro in range(accumulate):
            where = Where(step, micro)
            torch.manual_seed(where.seed)
            loss = case.loss(model, cast(case.batch(where), TORCH_DTYPES[dtype]))
            (loss / accumulate).backward()
            run.losses.append(loss.item())
        run.norms.append(optimizer.norm())
        optimizer.step()
        optimizer.zero_grad()
    run.masters = optimizer.whole()
    run.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return run


def initialized(
    case: Case, dtype: str, settings: dict[str, Any]
) -> tuple[nn.Module, hetero.HybridAdam]:
    """The case's model and optimizer under hetero."""
    torch.manual_seed(0)
    with hetero.ZeroInitContext(dtype=dtype, chunk_numel=SLOT_NUMEL, **settings):
        model = case.make()
    return hetero.initialize(model, hetero.HybridAdam(model.parameters(), **OPTIONS))


def least_host_memory(case: Case, dtype: str, nvme_path: str, **options: Any) -> int:
    """Bytes with which all state is on disk, as the refusal of fewer names them."""
    largest = max(p.numel() * p.element_size() for p in case.make().parameters())
    settings = {
        **options,
        "placement_policy": "nvme",
        "nvme_path": nvme_path,
        "host_memory": largest + 32768,
    }
    smallest = smallest_host_memory(lambda: initialized(case, dtype, settings))
    # A model that was built and refused gives up its file with the garbage, in two rounds: its own
    # cycles, and then those of what its graphs referred to.
    gc.collect()
    return smallest + case.more_slots * SLOT_NUMEL * TORCH_DTYPES[dtype].itemsize


def run_hetero(case: Case, dtype: str, accumulate: int, settings: dict[str, Any]) -> Run:
    """The same with hetero."""
    model, optimizer = initialized(case, dtype, settings)
    engine = optimizer.engine
    run = Run()
    for step in range(STEPS):
        for micro in range(accumulate):
            where = Where(step, micro)
            torch.manual_seed(where.seed)
            loss = case.loss(model, case.batch(where))
            optimizer.backward(loss / accumulate)
            run.losses.append(loss.item())
            del loss
            assert engine.params.leased_copies() == 0, "nothing is held after a backward"
        run.norms.append(hetero.clip_grad_norm_(model.parameters(), 1e30).item())
        optimizer.step()
        optimizer.zero_grad()
    names = dict(model.named_parameters())
    run.masters = dict(zip(names, hetero.masters(names.values()), strict=True))
    run.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    run.placement = engine.placement
    engine.close()
    return run
