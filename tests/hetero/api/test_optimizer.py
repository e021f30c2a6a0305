"""HybridAdam is a true torch optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from offload.memory.tiers import Tier
from tests.support.training.loops import batches, build, tiny_gpt2


def step(model: torch.nn.Module, optimizer: hetero.HybridAdam, tokens: torch.Tensor) -> float:
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("host_memory", ["64MiB", "400KiB"])
def test_loading_fp32_weights_keeps_every_bit(host_memory: str, tmp_path: Path) -> None:
    model, optimizer = build(
        dtype="bf16", placement_policy="nvme", nvme_path=str(tmp_path), host_memory=host_memory
    )
    torch.manual_seed(7)
    other = tiny_gpt2()
    model.load_state_dict(other.state_dict())
    assert all(map(torch.equal, hetero.masters(model.parameters()), other.parameters()))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other.state_dict(), "transformer.wpe.weight": torch.ones(3, 3)})
    with pytest.raises(hetero.HeteroError, match="assign"):
        model.load_state_dict(other.state_dict(), assign=True)
    step(model, optimizer, batches(1)[0])
    optimizer.engine.close()


def test_parameters_without_gradient_are_not_updated(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(8, 8)
            self.b = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            return getattr(self, which)(x)

    model, optimizer = build(Two, placement_policy="nvme", dtype="fp32", nvme_path=str(tmp_path))
    torch.manual_seed(0)
    plain = Two()
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for which in ("a", "a", "b", "a"):
        x = torch.randn(4, 8)
        model(x, which).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(x, which).square().sum().backward()
        adam.step()
        adam.zero_grad()
    steps = [state["step"].item() for state in optimizer.state_dict()["state"].values()]
    assert steps == [3, 3, 1, 1]
    for master, expected in zip(
        hetero.masters(model.parameters()), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-6)
    optimizer.engine.close()


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
