"""hetero.save() and hetero.load(): training goes on with the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hetero
from hetero.checkpoint.manifest import read_manifest
from tests.support.checkpoint.small_trainings import (
    PLACES,
    RULES_AND_DTYPES,
    build,
    first,
    states,
    steps,
    whole,
)
from tests.support.training.loops import same
from tests.support.training.small_net import SETTINGS, Net, Settings
from tests.support.training.smallest import smallest_host_memory

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(
    ("place", "rule", "dtype", "state_dtype"),
    [(("cpu", "disk")[i % 2], *each) for i, each in enumerate(RULES_AND_DTYPES)],
)
def test_every_rule_and_dtype_goes_on(
    place: str, rule: str, dtype: str, state_dtype: str, tmp_path: Path
) -> None:
    """Three steps, save, two steps; and load elsewhere, two steps: the same bits."""
    model, optimizer = build(PLACES[place], tmp_path, rule, dtype, state_dtype)
    steps(model, optimizer, range(3))
    stored, scale = whole(model, optimizer), vars(first(optimizer).engine.shared.loss_scale).copy()
    hetero.save(tmp_path / "saved", model, optimizer)
    steps(model, optimizer, range(3, 5))
    wanted = whole(model, optimizer)
    first(optimizer).engine.close()

    elsewhere = PLACES["disk" if place == "cpu" else "cpu"]
    model, optimizer = build(elsewhere, tmp_path, rule, dtype, state_dtype, seed=7)
    steps(model, optimizer, range(9, 10))
    loaded = hetero.load(tmp_path / "saved", model, optimizer)
    assert (loaded.step, loaded.ranks) == (3, 1)
    assert same(whole(model, optimizer), stored)
    assert vars(first(optimizer).engine.shared.loss_scale) == scale
    steps(model, optimizer, range(3, 5))
    assert same(whole(model, optimizer), wanted)
    first(optimizer).engine.close()


def test_another_rule_with_states_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Both keep a momentum_buffer, of other scales."""

    def build(rule: type[hetero.HybridOptimizer]) -> tuple[nn.Module, hetero.HybridOptimizer]:
        model = nn.Linear(8, 8, bias=False)
        return hetero.initialize(model, rule(model.parameters()), placement_policy="cpu")  # type: ignore

    model, optimizer = build(hetero.HybridSGD)
    hetero.save(tmp_path / "saved", model, optimizer)
    hetero.save_dcp(tmp_path / "dcp", model, optimizer)
    optimizer.engine.close()
    model, optimizer = build(hetero.HybridMuon)
    for load, name in ((hetero.load, "saved"), (hetero.load_dcp, "dcp")):
        with pytest.raises(ValueError, match=r"group 0 of the checkpoint is not HybridMuon's: it"):
            load(tmp_path / name, model, optimizer)
    optimizer.engine.close()


@pytest.mark.usefixtures("fake_cuda")
def test_every_placement_goes_on_from_another_one(tmp_path: Path) -> None:
    """By turns, a step each: a checkpoint knows of no placement."""
    for made, settings in enumerate([*PLACES.values(), PLACES["cpu"]]):
        model, optimizer = build(settings, tmp_path, seed=7 if made else 0)
        if made:
            assert hetero.load(tmp_path / "saved", model, optimizer).step == made
        assert same(whole(model, optimizer), states()[made])
        steps(model, optimizer, range(made, made + 1))
        hetero.save(tmp_path / "saved", model, optimizer)
        optimizer.engine.close()


@pytest.mark.parametrize(
    ("dtype", "device", "state_dtype"),
    [
        (torch.float64, "cpu", "fp32"),
        (torch.bfloat16, "cpu", "8bit"),
        (torch.float32, "meta", "8bit"),
    ],
)
def test_torchs_default_dtype_and_device_have_no_say(
    dtype: torch.dtype, device: str, state_dtype: str, tmp_path: Path
) -> None:
    """A program may make its own tensors in another dtype than fp32, and on a GPU."""
    model, optimizer = build(PLACES["disk"], tmp_path, state_dtype=state_dtype)
    steps(model, optimizer, range(2))
    late = optimizer.state_dict()
    for state in late["state"].values():
        state["step"] = 1001  # which bf16 has not
    optimizer.load_state_dict(late)
    wanted, before = whole(model, optimizer), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        found = [whole(model, optimizer)]
        hetero.save(tmp_path / "own", model, optimizer)
        hetero.save_dcp(tmp_path / "dcp", model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        for load, name in ((hetero.load, "own"), (hetero.load_dcp, "dcp")):
            load(tmp_path / name, model, optimizer)
            found.append(whole(model, optimizer))
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert all(same(each, wanted) for each in found)
    optimizer.engine.close()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_another_dtype_has_the_same_masters_and_states(dtype: str, tmp_path: Path) -> None:
    model, optimizer = build(PLACES["disk"], tmp_path)
    steps(model, optimizer, range(3))
    hetero.save(tmp_path / "saved", model, optimizer)
    masters, states = hetero.masters(model.parameters()), optimizer.state_dict()["state"]
    optimizer.engine.close()
    model, optimizer = build(PLACES["cpu"], tmp_path, dtype=dtype, seed=7)
    hetero.load(tmp_path / "saved", model, optimizer)
    assert same(hetero.masters(model.parameters()), masters)
    found = optimizer.state_dict()["state"]
    assert all(torch.equal(found[i][key], states[i][key]) for i in states for key in states[i])
    rounded = [master.to(next(model.parameters()).dtype) for master in masters]
    assert same([p.detach().clone() for p in model.parameters()], rounded)
    optimizer.engine.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_parameters_alone(settings: Settings, tmp_path: Path) -> None:
    """Without an optimizer its states and numbers of updates stay, and so do random numbers."""
    model, optimizer = build(settings, tmp_path)
    steps(model, optimizer, range(3))
    masters = hetero.masters(model.parameters())
    hetero.save(tmp_path / "saved", model)
    optimizer.engine.close()
    model, optimizer = build(settings, tmp_path, seed=7)
    steps(model, optimizer, range(2))
    before = optimizer.state_dict()["state"]
    random_state = torch.get_rng_state()
    hetero.load(tmp_path / "saved", model)
    assert same(hetero.masters(model.parameters()), masters)
    after = optimizer.state_dict()["state"]
    for index, state in before.items():
        kept = {key: value for key, value in state.items() if key != "master"}
        assert all(torch.equal(after[index][key], value) for key, value in kept.items())
    assert torch.equal(torch.get_rng_state(), random_state)
    optimizer.engine.close()


class Odd(nn.Module):
    """Frozen and tied parameters, buffers of both kinds, and parameters that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.first.weight
        self.norm = nn.BatchNorm1d(64)
        self.norm.table = nn.Parameter(torch.arange(7), requires_grad=False)
        self.norm.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scratch", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.frozen(self.first(x))))


def odd(settings: Settings, path: Path, seed: int) -> tuple[Odd, hetero.HybridAdam]:
    torch.manual_seed(seed)
    model = Odd()
    optimizer = hetero.HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    options = {"nvme_path": str(path), "chunk_numel": 4096, "dtype": "bf16", **settings}
    return hetero.initialize(model, optimizer, **options)


@pytest.mark.parametrize("settings", [PLACES["cpu"], PLACES["disk"]])
def test_all_kinds_of_parameters_and_buffers(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = odd(settings, tmp_path, 0)
    model.norm.table.data.add_(5)
    steps(model, optimizer, range(2))
    hetero.save(tmp_path / "saved", model, optimizer)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.engine.close()
    model, optimizer = odd(settings, tmp_path, 7)
    scratch = model.scratch.clone()
    hetero.load(tmp_path / "saved", model, optimizer)
    found = model.state_dict()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert torch.equal(model.scratch, scratch)
    optimizer.engine.close()


class Counter:
    """An object of `extra`, which takes even numbers alone."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        if self.count % 2:
            raise KeyError("odd")


@pytest.mark.parametrize("durable", [False, True])
def test_an_object_that_refuses_its_state_changes_nothing(durable: bool, tmp_path: Path) -> None:
    """Neither the model nor the optimizer, nor the object and those before it."""
    settings = {**PLACES["disk"], "durable": durable, "commit_every": 0}
    model, optimizer = build(settings, tmp_path)
    steps(model, optimizer, range(1))
    saved = {"first": Counter(2), "second": Counter(3)}
    if durable:
        hetero.commit(model, extra=saved, blocking=True)
        optimizer.engine.close()
        model, optimizer = build(settings, tmp_path, seed=7)
    else:
        hetero.save(tmp_path / "saved", model, optimizer, extra=saved)
        steps(model, optimizer, range(1, 2))
    optimizer.param_groups[0]["lr"] = 0.5
    before, drawn = whole(model, optimizer), torch.get_rng_state()
    extra = {"first": Counter(4), "second": Counter(6)}
    with pytest.raises(
        hetero.CheckpointError, match=r"extra\['second'\], a Counter, does not take .*KeyError"
    ):
        if durable:
            hetero.resume(model, extra=extra)
        else:
            hetero.load(tmp_path / "saved", model, optimizer, extra=extra)
    assert [each.count for each in extra.values()] == [4, 6]
    assert same(whole(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert optimizer.param_groups[0]["lr"] == 0.5
    if durable:
        assert hetero.resume(model) is not None
    else:
        steps(model, optimizer, range(2, 3))  # it can be used
    optimizer.engine.close()


def test_param_groups_schedulers_random_numbers_and_values(tmp_path: Path) -> None:
    """What is beside the model goes on, too: what is drawn after save() is drawn after load()."""
    model, optimizer = build(PLACES["cpu"], tmp_path)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=20)
    generator = torch.Generator().manual_seed(3)

    def extra() -> dict[str, Any]:
        return {"scheduler": scheduler, "generator": generator}

    def drawn() -> tuple[Any, ...]:
        noise = torch.rand(2).tolist(), torch.rand(2, generator=generator).tolist()
        return (*noise, random.random(), np.random.rand())

    for seed in range(3):
        steps(model, optimizer, range(seed, seed + 1))
        scheduler.step()
    optimizer.param_groups[0]["note"] = "kept"
    hetero.save(tmp_path / "saved", model, optimizer, extra={**extra(), "epoch": 4, "at": (1, 2)})
    wanted, rates, betas = drawn(), [], optimizer.param_groups[0]["betas"]
    for _ in range(5):
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    optimizer.engine.close()

    model, optimizer = build(PLACES["disk"], tmp_path, seed=7)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=20)
    generator = torch.Generator().manual_seed(8)
    loaded = hetero.load(tmp_path / "saved", model, optimizer, extra=extra())
    assert (loaded.extra["epoch"], loaded.extra["at"]) == (4, (1, 2))
    assert drawn() == wanted
    group = optimizer.param_groups[0]
    assert (group["betas"], group["note"]) == (betas, "kept")
    for rate in rates:
        scheduler.step()
        assert group["lr"] == rate
    optimizer.engine.close()


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model, optimizer = build(PLACES["cpu"], tmp_path)
    with pytest.raises(ValueError, match=r"extra\['a'\]\[1\] is of type .*Path"):
        hetero.save(tmp_path / "saved", model, optimizer, extra={"a": [1, tmp_path]})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is no checkpoint; choose another path"):
        hetero.save(tmp_path / "other", model, optimizer)
    with pytest.raises(hetero.HeteroError, match="not a part of it or a wrapper"):
        hetero.save(tmp_path / "saved", nn.Sequential(model), optimizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]
    optimizer.engine.close()


@pytest.mark.parametrize("has_room", [True, False])
def test_what_was_just_unfrozen(has_room: bool, tmp_path: Path) -> None:
    """It is saved as load() wants it, trained; without room for its state as it is, frozen."""

    def build(host_memory: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Net()
        model.first.weight.requires_grad_(False)
        optimizer = hetero.HybridAdam(model.parameters(), lr=1e-3)
        options = {**PLACES["cpu"], "host_memory": host_memory, "chunk_numel": 4096}
        return hetero.initialize(model, optimizer, options)

    model, optimizer = build(1 << 20 if has_room else smallest_host_memory(lambda: build(1 << 16)))
    steps(model, optimizer, range(1))
    model.first.weight.requires_grad_(True)
    stored = hetero.masters(model.parameters())
    hetero.save(tmp_path / "saved", model, optimizer)
    if has_room:
        steps(model, optimizer, range(1, 3))
        wanted = whole(model, optimizer)
        hetero.load(tmp_path / "saved", model, optimizer)
        assert same(hetero.masters(model.parameters()), stored)
        steps(model, optimizer, range(1, 3))
        assert same(whole(model, optimizer), wanted)
    else:
        with pytest.raises(hetero.BudgetError):
            steps(model, optimizer, range(1, 2))
    assert read_manifest(tmp_path / "saved").params["first.weight"].trained == has_room
    optimizer.engine.close()
