"""A small net with every kind of optimizer in every placement, and what its training keeps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetero
from tests.support.training.small_net import EMULATED, Net, Settings, loss_of

RULES: dict[str, Callable[..., hetero.HybridOptimizer]] = {
    "adam": hetero.HybridAdam,
    "lion": hetero.HybridLion,
    "adagrad": hetero.HybridAdagrad,
    "sgd": partial(hetero.HybridSGD, momentum=0.9, dampening=0.5),
    "muon": hetero.HybridMuon,
}
# Rules, compute dtypes and dtypes of states: each rule, and each dtype of either kind.
RULES_AND_DTYPES = [
    ("adam", "bf16", "fp32"),
    ("adam", "fp16", "bf16"),
    ("adam", "bf16", "8bit"),
    ("adam", "fp32", "8bit"),
    ("lion", "bf16", "bf16"),
    ("lion", "fp32", "fp32"),
    ("adagrad", "bf16", "fp32"),
    ("sgd", "bf16", "bf16"),
    ("sgd", "fp16", "8bit"),
    ("muon", "bf16", "fp32"),
    ("muon", "fp32", "bf16"),
]
PLACES: dict[str, Settings] = {
    "cpu": {"placement_policy": "cpu"},
    "disk": {"placement_policy": "nvme", "host_memory": "256KiB"},
    "speculative": {
        "placement_policy": "nvme",
        "host_memory": "200KiB",  # with more, buffers keep all optimizer states
        "debug": {"overlap_updates": "both"},
    },
    "waiting": {
        "placement_policy": "auto",
        "host_memory": "200KiB",
        "debug": {"overlap_updates": "none"},
    },
    "large chunks": {"placement_policy": "nvme", "host_memory": "1MiB", "chunk_numel": 16384},
    "emulated": EMULATED.values[0],  # type: ignore[dict-item]
    "cuda": {"placement_policy": "auto", "backend": "cuda", "device_memory": "160KiB"},
}
# With Adam alone: no parameter has its home in RAM.
ALL_PLACES: dict[str, Settings] = {
    **PLACES,
    "parameters on disk": {"placement_policy": "nvme", "host_memory": "96KiB"},
}


def build(
    settings: Settings,
    path: Path,
    rule: str = "adam",
    dtype: str = "bf16",
    state_dtype: str = "fp32",
    seed: int = 0,
) -> tuple[nn.Module, Any]:
    """A net whose matrices one optimizer has, and with Muon another one the rest."""
    torch.manual_seed(seed)
    model = Net()
    model.register_buffer("mean", torch.rand(3))
    params = [p for p in model.parameters() if p.ndim == 2 or rule != "muon"]
    made: Any = RULES[rule](params, lr=1e-3, weight_decay=0.1, state_dtype=state_dtype)
    if rule == "muon":
        rest = [p for p in model.parameters() if p.ndim != 2]
        made = [made, hetero.HybridAdam(rest, lr=1e-3)]
    more = {"nvme_path": str(path), "chunk_numel": 4096, "initial_loss_scale": 256.0}
    return hetero.initialize(model, made, dtype=dtype, **{**more, **settings})


def first(optimizer: Any) -> hetero.HybridOptimizer:
    return optimizer[0] if isinstance(optimizer, list) else optimizer


def steps(model: nn.Module, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        first(optimizer).backward(loss_of(model, seed))
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
            each.zero_grad()


def whole(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Parameters, masters, buffers and states."""
    found = [value.clone() for value in model.state_dict().values()]
    found += hetero.masters(model.parameters())
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        for state in each.state_dict()["state"].values():
            found += [torch.as_tensor(value, device="cpu") for value in state.values()]
    return found


@cache
def states() -> list[list[torch.Tensor]]:
    """What there is after each number of up to 8 steps, in every placement."""
    with tempfile.TemporaryDirectory() as path:
        model, optimizer = build(PLACES["cpu"], Path(path))
        found = [whole(model, optimizer)]
        for step in range(8):
            steps(model, optimizer, range(step, step + 1))
            found.append(whole(model, optimizer))
        optimizer.engine.close()
    return found


def state_of(path: Path, settings: Settings = PLACES["cpu"]) -> tuple[int, list[torch.Tensor]]:
    """What a start goes on from: how many steps were committed, and what there was after them."""
    model, optimizer = build({**settings, "durable": True}, path)
    last = hetero.resume(model)
    found = whole(model, optimizer)
    optimizer.engine.close()
    return 0 if last is None else last.step, found
