"""Ranks that save and load DCP checkpoints: managed models, and FSDP2's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hetero
from hetero.checkpoint.dcp.write import DcpWrite
from tests.support.ranks.checkpointing import OPTIONS, RankNet, build, steps


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


def save_while_one_fails(rank: int, world: int, path: str) -> tuple[str, list[str]]:
    """Rank 1 cannot write; what each rank meets, and what is left."""
    model, optimizer = build(rank, world, path, 0, OPTIONS[2])
    write = DcpWrite.write
    if rank == 1:

        def full(*_: Any) -> bytes:
            raise hetero.StoreError(28, "no room", "disk")

        DcpWrite.write = full  # type: ignore[method-assign]
    told = ""
    try:
        hetero.save_dcp(Path(path) / "saved", model, optimizer)
    except (hetero.HeteroError, OSError) as error:
        told = f"{type(error).__name__}: {error}"
    DcpWrite.write = write  # type: ignore[method-assign]
    torch.distributed.barrier()
    left = sorted(each.name for each in Path(path).iterdir())
    torch.distributed.barrier()
    hetero.save_dcp(Path(path) / "saved", model, optimizer)
    optimizer.engine.close()
    return told, left
