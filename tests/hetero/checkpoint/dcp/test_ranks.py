"""DCP checkpoints of several ranks: FSDP2 reads hetero's, and hetero reads FSDP2's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hetero
from hetero.checkpoint.dcp.metadata import read_metadata
from tests.support.ranks.checkpointing import OPTIONS, RankNet, build, steps
from tests.support.ranks.processes import RankPool, run_ranks


def save(rank: int, world: int, path: str) -> dict[str, Any]:
    """A managed model saves after two steps; what it had, and this rank's share of it."""
    model, optimizer = build(rank, world, path, 0, OPTIONS[world])
    steps(rank, model, optimizer, range(2))
    folder = Path(path) / f"hetero-{world}"
    hetero.save_dcp(folder, model, optimizer)
    found = managed(model, optimizer)
    own = 0  # elements of this rank's shards
    for chunk_group in optimizer.engine.chunk_groups:
        for m in chunk_group.members:
            _, in_param = m.in_shard(chunk_group.layout)
            own += in_param.stop - in_param.start
    optimizer.engine.close()
    return found | {"own": torch.tensor(own)}


def load(rank: int, world: int, path: str, names: list[str]) -> dict[str, Any]:
    """A managed model with other values loads each of the checkpoints."""
    found = {}
    for name in names:
        model, optimizer = build(rank, world, path, 7, OPTIONS[world])
        steps(rank, model, optimizer, range(1))
        hetero.load_dcp(Path(path) / name, model, optimizer)
        found[name] = managed(model, optimizer)
        optimizer.engine.close()
    return found


def managed(model: nn.Module, optimizer: hetero.HybridAdam) -> dict[str, torch.Tensor]:
    """Masters, buffers and states, whole, by key."""
    names, params = zip(*model.named_parameters(), strict=True)
    found = dict(zip(names, hetero.masters(list(params)), strict=True))
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, state in zip(names, optimizer.state_dict()["state"].values(), strict=True):
        found |= {f"{name} {s}": state[s] for s in ("exp_avg", "exp_avg_sq", "step")}
    return found


def fsdp(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = RankNet()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5 + seed)


def fsdp_found(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Like managed()."""

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    _, state = get_state_dict(model, optimizer)
    for name, states in state["state"].items():
        found |= {f"{name} {s}": whole(value) for s, value in states.items()}
    return found


def fsdp_save(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    """FSDP2 saves after two steps, whose gradients are the weights; what it had."""
    model, optimizer = fsdp(3)
    for _ in range(2):
        for param in model.parameters():
            param.grad = param.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    params, state = get_state_dict(model, optimizer)
    dcp.save({"model": params, "optim": state}, checkpoint_id=f"{path}/fsdp-{world}")
    return fsdp_found(model, optimizer)


def fsdp_load(rank: int, world: int, path: str, names: list[str]) -> dict[str, Any]:
    """FSDP2 with other values loads each of the checkpoints, as torch's tutorial has it."""
    found = {}
    for name in names:
        model, optimizer = fsdp(4)
        params, state = get_state_dict(model, optimizer)
        both = {"model": params, "optim": state}
        dcp.load(both, checkpoint_id=f"{path}/{name}")
        set_state_dict(
            model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optim"]
        )
        found[name] = {**fsdp_found(model, optimizer), "lr": optimizer.param_groups[0]["lr"]}
    return found


pytestmark = pytest.mark.usefixtures("nothing_left")

COUNTS = [1, 2, 4]
Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, ranks_of: Ranks
) -> tuple[Path, dict[str, list[Any]]]:
    """A checkpoint of each number of ranks, and of two of FSDP2; and what their ranks had."""
    path = tmp_path_factory.mktemp("saved")
    found = {f"hetero-{n}": ranks_of(n).run(save, str(path)) for n in COUNTS}
    # (FSDP2's tensors keep the meshes of ended process groups, so its ranks are processes anew.)
    found["fsdp-2"] = run_ranks(2, fsdp_save, str(path))
    return path, found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    keys = set(wanted) - {"own"}
    return keys <= set(found) and all(torch.equal(found[key], wanted[key]) for key in keys)


@pytest.mark.parametrize(
    "ranks", [4, *(pytest.param(ranks, marks=pytest.mark.extra) for ranks in (1, 2))]
)
def test_any_number_of_ranks_loads_any_other(
    ranks: int, saved: tuple[Path, dict[str, list[Any]]], ranks_of: Ranks
) -> None:
    """And FSDP2's: all masters and steps, bit for bit, and states as bf16 keeps them."""
    path, before = saved
    for mine in ranks_of(ranks).run(load, str(path), list(before)):
        for name, found in mine.items():
            wanted = dict(before[name][0])
            if name == "fsdp-2":  # these ranks keep states in bf16
                kept = {k: v.bfloat16().float() for k, v in wanted.items() if " exp_avg" in k}
                wanted |= kept
            assert same(found, wanted), name


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.extra), 3])
def test_fsdp2_loads_what_ranks_save(ranks: int, saved: tuple[Path, dict[str, list[Any]]]) -> None:
    path, before = saved
    names = [name for name in before if name != "fsdp-2"]
    for mine in run_ranks(ranks, fsdp_load, str(path), names):
        for name, found in mine.items():
            assert same(found, before[name][0]), name
            assert found["lr"] == 0.01


def test_each_rank_writes_its_own_shards(saved: tuple[Path, dict[str, list[Any]]]) -> None:
    """Of every element one rank, and none writes what would be another's."""
    path, before = saved
    metadata = read_metadata(path / "hetero-2")
    numels = {0: 0, 1: 0}
    for key, boxes in metadata.boxes.items():
        if key.startswith("model.") and key != "model.count":
            for box, place in boxes:
                numels[int(place.relative_path.split("_")[2])] += box.numel
    assert list(numels.values()) == [int(rank["own"]) for rank in before["hetero-2"]]
    assert min(numels.values()) > 0
