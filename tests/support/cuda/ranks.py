"""Ranks that compute on a fake CUDA device each. Each function runs on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh

import hetero
from offload.device.cuda_backend import CudaBackend
from tests.support.native.fake_cuda import FakeRuntime
from tests.support.ranks.rank_training import inputs, make

STEPS = 4


@contextmanager
def fake_device() -> Iterator[FakeRuntime]:
    """Inside the block backend="cuda" is a fake device of this rank's own."""
    made = FakeRuntime()
    with (
        patch("hetero.config.cuda_available", lambda: True),
        patch("hetero.config.default_device_bytes", lambda *_: 64 << 20),
        patch("hetero.config.CudaBackend", lambda: CudaBackend(made)),
    ):
        yield made


def train(
    rank: int, world: int, options: dict[str, Any], accumulate: int = 1, replicas: int = 1
) -> dict[str, Any]:
    """Trains on the fake device, or where `options` say; clips every other step.

    Returns losses, masters, and what the device had at most.
    """
    where: dict[str, Any] = {}
    if replicas > 1:
        where["mesh"] = init_device_mesh("cpu", (replicas, world // replicas))
    options = {"backend": "cuda", "chunk_numel": 16384, "rank_timeout_s": 60.0} | options
    with fake_device() as runtime:
        model, optimizer = make("layers", options, **where)
        engine = optimizer.engine
        losses = []
        for step in range(STEPS):
            for micro_batch in range(accumulate):
                loss = model(inputs(rank, 10 * step + micro_batch, 128)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            if step % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        found = {
            "losses": losses,
            "masters": hetero.masters(model.parameters()),
            "state": {name: t.clone() for name, t in model.state_dict().items()},
            "peak": engine.ledger.peak_bytes["device"],
            "budget": engine.ledger.budget_bytes["device"],
            "h2d": engine.traffic.h2d,
        }
        engine.close()
        found["left"] = (dict(engine.ledger.in_use_bytes), dict(runtime.page_locked))
    return found


def train_on_gpu(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """As train(), on the GPUs that this machine has, of which ranks may share one.

    Returns the losses and the masters.
    """
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.use_deterministic_algorithms(True, warn_only=True)
    given = {"backend": "cuda", "chunk_numel": 16384, "rank_timeout_s": 60.0, "dtype": "bf16"}
    model, optimizer = make("layers", given | options)
    found = []
    for step in range(STEPS):
        loss = model(inputs(rank, step, 128).cuda()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if step % 2 else 9.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    found += hetero.masters(model.parameters())
    optimizer.engine.close()
    return found
