"""HybridAdam is a true torch optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from offload.memory.tiers import Tier
from tests.support.training.loops import batches, build, tiny_gpt2


def test_closure_and_cpu_adam() -> None:
    torch.manual_seed(0)
    with hetero.ZeroInitContext(placement_policy="cpu", dtype="fp32"):
        model = tiny_gpt2()
    model, optimizer = hetero.initialize(model, hetero.CPUAdam(model.parameters(), lr=1e-2))
    tokens = batches(1)[0]

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return float(loss.detach())

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    optimizer.engine.close()


def test_cpu_adam_updates_nothing_on_a_device(tmp_path: Path) -> None:
    """Frozen parameters may be there. Without one HybridAdam, with as much, has all there."""
    found = []
    for kind in (hetero.HybridAdam, hetero.CPUAdam):
        torch.manual_seed(0)
        model = tiny_gpt2()
        model.transformer.h[0].requires_grad_(False)
        optimizer = kind(model.parameters(), lr=1e-2)
        options: dict[str, Any] = {
            "placement_policy": "auto",
            "backend": "emulated",
            "device_memory": "64MiB",
        }
        hetero.initialize(model, optimizer, **options, chunk_numel=4096, nvme_path=str(tmp_path))
        engine = optimizer.engine
        engine.set_budget(device_memory="32MiB")
        for chunk in engine.layout.chunks:
            there = engine.placement.param[chunk.id] is Tier.DEVICE
            assert there == (kind is hetero.HybridAdam or not chunk.trainable)
        for tokens in batches(2):
            optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(hetero.masters(model.parameters()))
        engine.close()
    assert all(map(torch.equal, *found))
    with pytest.raises(ValueError, match="CPUAdam updates on the CPU"):
        model = tiny_gpt2()
        options["placement_policy"] = "cuda"
        hetero.initialize(model, hetero.CPUAdam(model.parameters()), **options)


def test_a_group_of_what_is_not_in_the_model_is_refused() -> None:
    _, optimizer = build(placement_policy="cpu")
    with pytest.raises(ValueError, match=r"shape \(3,\) that is not one of this model's"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    optimizer.engine.close()
