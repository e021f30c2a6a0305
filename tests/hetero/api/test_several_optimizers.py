"""hetero/api/optimizer: several optimizers over one model, each of its own parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.stand_ins.parameter_classes import AbsentParameter
from tests.support.training.pair import Make, Pair
from tests.support.training.small_net import EMULATED, SETTINGS, Net, Settings, loss_of

pytestmark = pytest.mark.usefixtures("nothing_left")


def parts(model: Net) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and all others."""
    params = list(model.parameters())
    return [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]


def sgd_and_adam(model: Net, managed: bool) -> list[Any]:
    matrices, others = parts(model)
    if managed:
        return [
            hetero.HybridSGD(matrices, lr=0.05, momentum=0.9),
            hetero.HybridAdam(others, lr=1e-2),
        ]
    return [
        torch.optim.SGD(matrices, lr=0.05, momentum=0.9),
        torch.optim.AdamW(others, lr=1e-2, weight_decay=0.0),
    ]


def two_adams(model: Net, managed: bool) -> list[Any]:
    """Whose parameters lie in the same chunks."""
    first, others = [*model.first.parameters(), model.scale], [*model.last.parameters()]
    others += model.unused.parameters()
    if managed:
        return [hetero.HybridAdam(first, lr=1e-2), hetero.HybridAdam(others, lr=1e-3)]
    return [
        torch.optim.AdamW(first, lr=1e-2, weight_decay=0.0),
        torch.optim.AdamW(others, lr=1e-3, weight_decay=0.0),
    ]


def pair_of(make: Make, settings: Settings, path: Path) -> Pair:
    """On disk with nearly the least memory."""
    on_disk = settings["placement_policy"] == "nvme"
    return Pair(Net, make, settings, path, **({"host_memory": "192KiB"} if on_disk else {}))


ALL = [*SETTINGS, EMULATED]


@pytest.mark.covering(1)
@pytest.mark.parametrize("make", [sgd_and_adam, two_adams])
@pytest.mark.parametrize("settings", ALL)
def test_each_updates_its_own(make: Make, settings: Settings, tmp_path: Path) -> None:
    """Together, and in turns as a generator and its discriminator."""
    pair = pair_of(make, settings, tmp_path)
    turns = [slice(None)] * 3 + [slice(0, 1), slice(1, 2)] * 2
    for seed, which in enumerate(turns):
        pair.step(seed, which=which)
        pair.assert_same(1e-5)
    assert pair.engine is pair.ours[1].engine
    assert len(pair.engine.chunk_groups) == (2 if make is sgd_and_adam else 1)
    pair.engine.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_states_of_each_are_saved_and_loaded(settings: Settings, tmp_path: Path) -> None:
    pair = pair_of(sgd_and_adam, settings, tmp_path)
    pair.step(0)
    saved = pair.model.state_dict(), [o.state_dict() for o in pair.ours]
    assert set(saved[1][0]["state"][0]) == {"step", "momentum_buffer", "master"}
    assert set(saved[1][1]["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "master"}
    pair.step(1)
    wanted = hetero.masters(pair.model.parameters())
    with pytest.raises(
        ValueError, match="param group 0 of the state has 4 parameters, and this optimizer.s has 3"
    ):
        pair.ours[0].load_state_dict(saved[1][1])
    pair.model.load_state_dict(saved[0])
    for optimizer, state in zip(pair.ours, saved[1], strict=True):
        optimizer.load_state_dict(state)
    loss_of(pair.model, 1).backward()
    for optimizer in pair.ours:
        optimizer.step()
    assert all(map(torch.equal, hetero.masters(pair.model.parameters()), wanted))
    pair.engine.close()


def test_parameters_that_come_later(tmp_path: Path) -> None:
    """Frozen ones and new ones get the states of the optimizer that has them."""
    model = Net()
    model.last.weight.requires_grad_(False)
    first = hetero.HybridAdam(model.first.parameters(), lr=1e-2)
    last = hetero.HybridSGD([model.last.weight, model.last.bias], lr=1e-2, momentum=0.9)
    model, (first, last) = hetero.initialize(
        model, (first, last), dtype="fp32", reserve_memory="1MiB", host_memory="4MiB"
    )
    loss_of(model).backward()
    for optimizer in (first, last):
        optimizer.step()
        optimizer.zero_grad()
    model.last.weight.requires_grad_(True)
    last.add_param_group({"params": list(model.unused.parameters()), "momentum": 0.5})
    (loss_of(model) + model.unused(torch.ones(1, 8)).sum()).backward()
    for optimizer in (first, last):
        optimizer.step()
    assert last.engine.find(model.last.weight).step == 1
    assert {k for s in last.state_dict()["state"].values() for k in s} == {
        "step",
        "momentum_buffer",
        "master",
    }
    assert len(last.state_dict()["state"]) == 4
    last.engine.close()


def test_what_is_refused() -> None:
    model = Net()
    one = hetero.HybridAdam(model.first.parameters())
    both = hetero.HybridSGD(model.parameters())
    with pytest.raises(ValueError, match=r"first\.weight is in optimizer number 0 and in number 1"):
        hetero.initialize(model, [one, both])
    with pytest.raises(ValueError, match="list of optimizers is empty"):
        hetero.initialize(model, [])
    with pytest.raises(ValueError, match="not torch.optim.sgd.SGD"):
        hetero.initialize(model, [one, torch.optim.SGD(model.last.parameters())])


class Adversaries(nn.Module):
    """A generator and its discriminator, whose small parameters share chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(12))
        self.generator = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 24))
        self.discriminator = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 1))

    def parts(self) -> list[list[nn.Parameter]]:
        """The parameters of each optimizer."""
        return [
            list(self.generator.parameters()),
            [*self.ballast.parameters(), *self.discriminator.parameters()],
        ]


def play(model: Any, optimizers: list[Any], seed: int) -> list[float]:
    """One turn of each: the generator's outputs are used in both, and made once."""
    of_generator, of_discriminator = optimizers
    generator = torch.Generator().manual_seed(seed)
    noise, real = torch.randn(4, 16, generator=generator), torch.randn(4, 24, generator=generator)
    fake = model.generator(noise)
    judged = model.discriminator(fake.detach()).mean() - model.discriminator(real).mean()
    judged.backward()
    of_discriminator.step()
    of_discriminator.zero_grad()
    fooled = -model.discriminator(fake).mean()
    fooled.backward()
    of_generator.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return [judged.item(), fooled.item()]


@pytest.mark.parametrize("settings", [*SETTINGS, EMULATED])
def test_a_step_leaves_graphs_over_other_parameters_of_its_chunks_alone(
    settings: Settings, tmp_path: Path
) -> None:
    """A generator's graph outlives its discriminator's step. Updates, by SGD, have torch's bits."""
    options = {**settings, "nvme_path": str(tmp_path), "chunk_numel": 4096, "dtype": "fp32"}
    if settings["placement_policy"] == "nvme" and "backend" not in settings:
        options["host_memory"] = "128KiB"
    torch.manual_seed(0)
    plain = Adversaries()
    theirs = [torch.optim.SGD(params, lr=0.25) for params in plain.parts()]
    torch.manual_seed(0)
    with hetero.ZeroInitContext(**options):
        model = Adversaries()
    ours = [hetero.HybridSGD(params, lr=0.25) for params in model.parts()]
    model, ours = hetero.initialize(model, ours)
    chunks = [
        {m.chunk.id for m in ours[0].engine.params.in_order() if name in m.name}
        for name in ("generator", "discriminator")
    ]
    assert chunks[0] & chunks[1], "a chunk has parameters of both"
    in_place = [p for p in model.generator.parameters() if not isinstance(p, AbsentParameter)]
    assert not in_place or settings["placement_policy"] == "cpu", "its graphs save no memory"
    for seed in range(4):
        assert play(model, ours, seed) == play(plain, theirs, seed)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.detach(), wanted)
    # What was updated itself is still stale.
    loss = model.discriminator(model.generator(torch.ones(1, 16))).sum()
    model.generator(torch.ones(1, 16)).sum().backward()
    ours[0].step()
    with pytest.raises((hetero.StaleGraphError, RuntimeError), match="before|modified by"):
        loss.backward()
    del loss
    ours[0].engine.close()
