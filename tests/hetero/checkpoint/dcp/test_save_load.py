"""hetero.save_dcp() and load_dcp() against plain torch's dcp.load() and dcp.save()."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import hetero
from hetero.checkpoint import engine_checkpoint
from hetero.checkpoint.formats import convert
from tests.support.checkpoint import small_trainings
from tests.support.checkpoint.small_trainings import PLACES, steps, whole
from tests.support.training.small_net import Settings

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """torch warns that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class Net(nn.Module):
    """Tied and frozen parameters, ones that get no gradient, odd shapes, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.odd = nn.Parameter(torch.randn(5, 7, 11))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y = self.frozen(self.embed(x)) * self.scale + self.odd.mean()
        out: torch.Tensor = self.head(y)
        return out


HETERO: dict[str, Callable[..., hetero.HybridOptimizer]] = {
    "adamw": partial(hetero.HybridAdam, weight_decay=0.1),
    "adam": partial(hetero.HybridAdam, adamw_mode=False),
    "sgd": partial(hetero.HybridSGD, momentum=0.9, dampening=0.5),
    "adagrad": hetero.HybridAdagrad,
}
TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, weight_decay=0.3),
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.1),
    "adagrad": torch.optim.Adagrad,
}
DISK = {"placement_policy": "nvme", "host_memory": "256KiB"}
SETTINGS: dict[str, Settings] = {"adamw": DISK, "adam": {}, "sgd": {}, "adagrad": DISK}
STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "adagrad": ("sum",),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups of what is trained."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.03}]


def managed(
    path: Path, rule: str = "adamw", dtype: str = "bf16", seed: int = 0, **settings: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = HETERO[rule](groups_of(model), lr=0.01 * (seed + 1))
    options = {"nvme_path": str(path), "chunk_numel": 4096, "placement_policy": "cpu", **settings}
    return hetero.initialize(model, optimizer, dtype=dtype, **options)


def plain(rule: str = "adamw", seed: int = 9) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, TORCH[rule](groups_of(model), lr=0.125)


def step(model: nn.Module, optimizer: Any, times: int = 3) -> None:
    for number in range(times):
        generator = torch.Generator().manual_seed(number)
        x = torch.randint(37, (16,), generator=generator)
        loss = model(x).float().square().mean()
        optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    names, params = zip(*model.named_parameters(), strict=True)
    found = hetero.masters(list(params)) if hasattr(params[0], "_hetero_engine") else params
    return {n: p.detach().float() for n, p in zip(names, found, strict=True)}


def states(optimizer: Any, rule: str) -> list[dict[str, torch.Tensor]]:
    """By number of parameter; what torch lacks of one that was never updated is zero."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = optimizer.state_dict()["state"]
    made = []
    for number, param in enumerate(params):
        state = found.get(number, {})
        wanted = {n: state.get(n) for n in STATES[rule]}
        made.append({n: torch.zeros(param.shape) if v is None else v for n, v in wanted.items()})
        if rule != "sgd":
            made[-1]["step"] = torch.tensor(float(state.get("step", 0)))
    return made


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        found, wanted = list(found.values()), list(wanted.values())
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert_same(one, other)


def torch_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    params, state = get_state_dict(model, optimizer)
    found = {"model": params, "optim": state}
    dcp.load(found, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"]
    )


@pytest.mark.parametrize("rule", HETERO)
def test_plain_torch_loads_what_hetero_saves(tmp_path: Path, rule: str) -> None:
    """Masters, states, options, buffers; and training goes on as hetero's does in fp32."""
    model, optimizer = managed(tmp_path, rule, "fp32", **SETTINGS[rule])
    step(model, optimizer)
    hetero.save_dcp(tmp_path / "saved", model, optimizer)
    other, torch_optimizer = plain(rule)
    torch_load(tmp_path / "saved", other, torch_optimizer)
    assert_same(masters(other), masters(model))
    assert_same(dict(other.named_buffers()), dict(model.named_buffers()))
    assert_same(states(torch_optimizer, rule), states(optimizer, rule))
    assert [group["lr"] for group in torch_optimizer.param_groups] == [0.01, 0.03]
    for name in ("weight_decay", "momentum", "dampening", "betas"):
        if name in optimizer.param_groups[0]:
            assert torch_optimizer.param_groups[0][name] == optimizer.param_groups[0][name]
    step(model, optimizer)
    step(other, torch_optimizer)
    for name, master in masters(model).items():
        torch.testing.assert_close(dict(other.named_parameters())[name].detach(), master)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", HETERO)
@pytest.mark.parametrize("flatten", [False, True])
def test_hetero_loads_what_plain_torch_saves(tmp_path: Path, rule: str, flatten: bool) -> None:
    """Of both layouts that torch has for optimizers' states."""
    other, torch_optimizer = plain(rule)
    step(other, torch_optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    params, state = get_state_dict(other, torch_optimizer, options=options)
    name = "optimizer" if flatten else "optim"
    dcp.save({"model": params, name: state}, checkpoint_id=tmp_path / "saved")
    model, optimizer = managed(tmp_path, rule, "fp32", seed=1, **SETTINGS[rule])
    step(model, optimizer, 1)
    hetero.load_dcp(tmp_path / "saved", model, optimizer)
    assert_same(masters(model), masters(other))
    assert_same(dict(model.named_buffers()), dict(other.named_buffers()))
    assert_same(states(optimizer, rule), states(torch_optimizer, rule))
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.03]
    step(model, optimizer)
    step(other, torch_optimizer)
    for name, master in masters(model).items():
        torch.testing.assert_close(master, dict(other.named_parameters())[name].detach())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_masters_and_states_survive_with_all_bits(tmp_path: Path, dtype: str) -> None:
    """Wherever they live, and whatever the compute dtype; by turns, a step each."""
    made, found = 0, list[torch.Tensor]()
    for place in ("cpu", "disk", "emulated", "cpu"):
        settings = {**PLACES[place], "host_memory": "1MiB", "device_memory": "1MiB"}
        model, optimizer = small_trainings.build(settings, tmp_path, dtype=dtype, seed=made)
        if made:
            hetero.load_dcp(tmp_path / f"{made}", model, optimizer)
            assert_same(whole(model, optimizer), found)
        steps(model, optimizer, range(made, made + 1))
        made, found = made + 1, whole(model, optimizer)
        hetero.save_dcp(tmp_path / f"{made}", model, optimizer)
        optimizer.engine.close()


def test_tied_names_share_their_bytes(tmp_path: Path) -> None:
    """And both are there for torch, which looks for both."""
    model, _ = managed(tmp_path)
    hetero.save_dcp(tmp_path / "saved", model)
    metadata = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    places: dict[str, set[tuple[str, int]]] = {}
    for index, place in metadata.storage_data.items():
        places.setdefault(index.fqn, set()).add((place.relative_path, place.offset))
    assert places["model.embed.weight"] == places["model.head.weight"]
    assert set(metadata.state_dict_metadata) == {f"model.{name}" for name in model.state_dict()}


def test_only_the_parameters(tmp_path: Path) -> None:
    """A model's state dict alone is read, too; the optimizer's states stay."""
    other, _ = plain()
    dcp.save(other.state_dict(), checkpoint_id=tmp_path / "saved")
    model, optimizer = managed(tmp_path)
    step(model, optimizer)
    before = states(optimizer, "adamw")
    hetero.load_dcp(tmp_path / "saved", model)
    assert_same(
        masters(model),
        masters(other)
        | {n: v.bfloat16().float() for n, v in masters(other).items() if n.startswith("frozen")},
    )
    assert_same(states(optimizer, "adamw"), before)
    with pytest.raises(ValueError, match="has 0 optimizers, and 1 are given; without any"):
        hetero.load_dcp(tmp_path / "saved", model, optimizer)


def test_converted_with_frozen_parameters_in_a_param_group(tmp_path: Path) -> None:
    """DCP does not tell them from those that were never updated; both are loaded as they were."""

    def build(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = Net()
        optimizer = hetero.AdamW(model.parameters(), lr=0.01)
        return hetero.initialize(model, optimizer, placement_policy="cpu", chunk_numel=4096)

    model, optimizer = build(0)
    step(model, optimizer)
    hetero.save_dcp(tmp_path / "saved", model, optimizer)
    convert(tmp_path / "saved", tmp_path / "own", "hetero")
    again, loaded = build(1)
    hetero.load(tmp_path / "own", again, loaded)
    assert_same(masters(again), masters(model))
    assert_same(states(loaded, "adamw"), states(optimizer, "adamw"))


def test_a_dtype_of_choice(tmp_path: Path) -> None:
    model, optimizer = managed(tmp_path)
    step(model, optimizer)
    hetero.save_dcp(tmp_path / "saved", model, optimizer, dtype="bf16")
    metadata = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert metadata["model.odd"].properties.dtype is torch.bfloat16
    assert metadata["model.mean"].properties.dtype is torch.float32
    assert metadata["optim.state.odd.exp_avg"].properties.dtype is torch.float32
    again, _ = managed(tmp_path, seed=1)
    hetero.load_dcp(tmp_path / "saved", again)
    assert_same(masters(again), {n: v.bfloat16().float() for n, v in masters(model).items()})


def test_two_optimizers(tmp_path: Path) -> None:
    """Their param groups follow one another, as those of torch's get_state_dict()."""
    model, optimizers = small_trainings.build(PLACES["cpu"], tmp_path, "muon")
    optimizers[0].param_groups[0]["lr"] = 0.01
    steps(model, optimizers, range(2))
    hetero.save_dcp(tmp_path / "saved", model, optimizers)
    again, loaded = small_trainings.build(PLACES["disk"], tmp_path, "muon", seed=1)
    hetero.load_dcp(tmp_path / "saved", again, loaded)
    assert_same(whole(again, loaded), whole(model, optimizers))
    assert [each.param_groups[0]["lr"] for each in loaded] == [0.01, 1e-3]
    for each in (optimizers, loaded):
        each[0].engine.close()


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = managed(tmp_path)
    step(model, optimizer)
    hetero.save_dcp(tmp_path / "saved", model, optimizer)
    net = Net()
    del net.unused
    made, own = hetero.initialize(
        net, HETERO["adamw"](groups_of(net)), dtype="bf16", placement_policy="cpu"
    )
    before = masters(made)
    with pytest.raises(ValueError, match="only in the checkpoint:\n    unused"):
        hetero.load_dcp(tmp_path / "saved", made, own)
    assert_same(masters(made), before)


def test_torchs_other_rules_are_refused(tmp_path: Path) -> None:
    other = Net()
    optimizer = torch.optim.AdamW(groups_of(other), amsgrad=True)
    params, state = get_state_dict(other, optimizer)
    dcp.save({"model": params, "optim": state}, checkpoint_id=tmp_path / "saved")
    model, own = managed(tmp_path)
    with pytest.raises(ValueError, match="in param group 0 of the state amsgrad=True"):
        hetero.load_dcp(tmp_path / "saved", model, own)
    own.param_groups[0]["bias_correction"] = False
    with pytest.raises(ValueError, match="bias_correction=False"):
        hetero.save_dcp(tmp_path / "other", model, own)
    assert not (tmp_path / "other").exists()


def test_an_object_that_is_no_plain_data_is_refused(tmp_path: Path) -> None:
    """Options are pickles, too."""
    other, optimizer = plain()
    params, state = get_state_dict(other, optimizer)
    state["param_groups"][0]["lr"] = _Touches(tmp_path / "ran")
    dcp.save({"model": params, "optim": state}, checkpoint_id=tmp_path / "saved")
    model, own = managed(tmp_path)
    with pytest.raises(
        hetero.CheckpointError,
        match=r"'optim\.param_groups\.0\.lr' .* names (builtins\.)?getattr",  # (as torch has it)
    ):
        hetero.load_dcp(tmp_path / "saved", model, own)
    assert not (tmp_path / "ran").exists()


class _Touches:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_damage_leaves_no_model_that_is_half_loaded(tmp_path: Path) -> None:
    model, optimizer = managed(tmp_path)
    step(model, optimizer)
    hetero.save_dcp(tmp_path / "good", model, optimizer)
    hetero.save_dcp(tmp_path / "bad", model, optimizer)
    wanted = masters(model)
    file = next((tmp_path / "bad").glob("*.distcp"))
    metadata = dcp.FileSystemReader(tmp_path / "bad").read_metadata()
    offset = max(p.offset for i, p in metadata.storage_data.items() if "odd" in i.fqn)
    content = bytearray(file.read_bytes())
    content[offset : offset + 4] = b"none"
    file.write_bytes(content)
    again, loaded = managed(tmp_path, seed=1)
    with pytest.raises(hetero.CheckpointError, match="is damaged"):
        hetero.load_dcp(tmp_path / "bad", again, loaded)
    with pytest.raises(hetero.HeteroError, match="half loaded"):
        again(torch.arange(3))
    hetero.load_dcp(tmp_path / "good", again, loaded)
    assert_same(masters(again), wanted)
    file.write_bytes(content[: offset + 10])
    with pytest.raises(hetero.CheckpointError, match="and the checkpoint needs"):
        hetero.load_dcp(tmp_path / "bad", again, loaded)


def test_what_is_there_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what cannot be written leaves nothing."""
    model, optimizer = managed(tmp_path)
    hetero.save_dcp(tmp_path / "saved", model, optimizer)
    content = {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()}
    with pytest.raises(ValueError, match="is there already"):
        hetero.save_dcp(tmp_path / "saved", model, optimizer)
    assert {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()} == content

    def full(what: Any, *_: object) -> None:
        if not isinstance(what, int) or "distcp" in os.readlink(f"/proc/self/fd/{what}"):
            raise OSError(28, "No space left on device")

    for owner, name in ((engine_checkpoint, "make_piece"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(hetero.StoreError, match=r"cannot write .*No space left"):
                hetero.save_dcp(tmp_path / "other", model, optimizer)
        assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    hetero.save_dcp(tmp_path / "other", model, optimizer)
