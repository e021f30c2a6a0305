"""Ranks that save and load checkpoints together."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hetero
from hetero.checkpoint.data_writer import DataWriter
from hetero.checkpoint.dcp.write import DcpWrite
from hetero.checkpoint.safetensors_header import read
from tests.support.ranks.rank_training import BASE, told
from tests.support.training.small_net import Net
from tests.support.waiting import until

# One for each number of ranks; with four, two replicas of two.
OPTIONS: dict[int, dict[str, Any]] = {
    1: {"placement_policy": "cpu"},
    2: {"placement_policy": "nvme", "host_memory": "2MiB", "zero_stage": 3},
    3: {"placement_policy": "cpu", "zero_stage": 2},
    4: {"placement_policy": "nvme", "host_memory": "2MiB", "zero_stage": 1},
}
MESHES = {4: (2, 2)}
COUNTS = (2, 3, 4)  # of ranks whose checkpoints and commits others load


class RankNet(Net):
    """With a buffer, and a dropout that draws other numbers on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.drop(super().forward(x))


def build(
    rank: int, world: int, path: str, seed: int, options: dict[str, Any]
) -> tuple[nn.Module, hetero.HybridAdam]:
    """The net on all ranks; `seed` is of its values, and of this rank's random numbers."""
    torch.manual_seed(seed)
    model = RankNet()
    where = {"mesh": init_device_mesh("cpu", MESHES[world])} if world in MESHES else {}
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2, state_dtype="bf16")
    # The smallest slots, of which each rank has a part that holds parameters.
    slots = {"chunk_numel": 4096 * world}
    given = {**BASE, **slots, "dtype": "bf16", "nvme_path": path, **options}
    torch.manual_seed(100 * seed + rank)
    return hetero.initialize(model, optimizer, **given, **where)


def steps(rank: int, model: nn.Module, optimizer: hetero.HybridAdam, seeds: range) -> None:
    """Each rank has its own batches."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(10 * seed + rank)
        x = torch.randn(4, 64, generator=generator)
        (model(x).float() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: hetero.HybridAdam) -> list[torch.Tensor]:
    """Masters, buffers and states."""
    found = hetero.masters(list(model.parameters()))
    found += [buffer.clone() for buffer in model.buffers()]
    for state in optimizer.state_dict()["state"].values():
        found += list(state.values())
    return found


def save(rank: int, world: int, path: str) -> dict[str, list[torch.Tensor]]:
    """Two steps, save, two steps; what there was at both times."""
    model, optimizer = build(rank, world, path, 0, OPTIONS[world])
    steps(rank, model, optimizer, range(2))
    stored = whole(model, optimizer)
    made = hetero.save(
        Path(path) / f"of-{world}", model, optimizer, extra={"rank": rank}, blocking=world % 2 == 0
    )
    steps(rank, model, optimizer, range(2, 4))
    made.wait()
    found = {"stored": stored, "then": whole(model, optimizer)}
    optimizer.engine.close()
    return found


def load(rank: int, world: int, path: str, saved_by: list[int]) -> dict[int, Any]:
    """Loads what each of these numbers of ranks has saved, and makes two steps more."""
    found: dict[int, Any] = {}
    for saved in saved_by:
        model, optimizer = build(rank, world, path, 7, OPTIONS[world])
        steps(rank, model, optimizer, range(1))
        random = torch.get_rng_state()
        loaded = hetero.load(Path(path) / f"of-{saved}", model, optimizer)
        stays = torch.equal(torch.get_rng_state(), random)
        stored = whole(model, optimizer)
        steps(rank, model, optimizer, range(2, 4))
        found[saved] = {
            "ranks": loaded.ranks,
            "rank": loaded.extra["rank"],
            "random_stays": stays,
            "stored": stored,
            "then": whole(model, optimizer),
        }
        optimizer.engine.close()
    return found


def save_while_one_fails(rank: int, world: int, path: str, dcp: bool) -> tuple[str, list[str]]:
    """Rank 1 cannot write its file, of hetero's format beside an earlier one; what each rank meets,
    and what is left. Then all go on, and save."""
    model, optimizer = build(rank, world, path, 0, OPTIONS[2])
    steps(rank, model, optimizer, range(1))
    save, owner, call = hetero.save, DataWriter, "finish"
    if dcp:
        save, owner, call = hetero.save_dcp, DcpWrite, "write"
    else:
        save(Path(path) / "saved", model, optimizer)
    full = hetero.StoreError(28, "no room", "disk")
    with ExitStack() as patches:
        if rank == 1:
            patches.enter_context(patch.object(owner, call, side_effect=full))
        found = told(lambda: save(Path(path) / "saved", model, optimizer))
    torch.distributed.barrier()
    left = sorted(each.name for each in Path(path).iterdir())
    torch.distributed.barrier()
    steps(rank, model, optimizer, range(1, 2))
    save(Path(path) / "saved", model, optimizer)
    optimizer.engine.close()
    return found, left


def save_after_one_was_told(rank: int, world: int, path: str) -> list[str]:
    """A save beside training fails on rank 1, and rank 0 alone waits for it; what each then meets
    in two more."""
    model, optimizer = build(rank, world, path, 0, OPTIONS[2])
    full = hetero.StoreError(28, "no room", "disk")
    with ExitStack() as patches:
        if rank == 1:
            patches.enter_context(patch.object(DataWriter, "finish", side_effect=full))
        made = hetero.save(Path(path) / "saved", model, optimizer, blocking=False)
        until(lambda: made.done)
    if rank == 0:
        with suppress(hetero.StoreError):
            made.wait()
    found = [told(lambda: hetero.save(Path(path) / "saved", model, optimizer)) for _ in range(2)]
    optimizer.engine.close()
    return found


def load_what_one_cannot_read(rank: int, world: int, path: str) -> list[Any]:
    """The file of rank 1 is damaged; what each rank meets, twice, and whether it goes on then."""
    model, optimizer = build(rank, world, path, 0, OPTIONS[2])
    steps(rank, model, optimizer, range(1))
    hetero.save(Path(path) / "bad", model, optimizer)
    hetero.save(Path(path) / "good", model, optimizer)
    stored = whole(model, optimizer)
    if rank == 1:
        file = Path(path) / "bad" / "rank-0001-of-0002.safetensors"
        content = bytearray(file.read_bytes())
        header = read(file)
        entry = next(e for e in header.entries.values() if e.name.startswith("model/"))
        content[header.data_offset + entry.begin] ^= 1
        file.write_bytes(content)
    torch.distributed.barrier()
    found: list[Any] = [
        told(lambda: hetero.load(Path(path) / "bad", model, optimizer)),
        told(lambda: steps(rank, model, optimizer, range(1))),
    ]
    hetero.load(Path(path) / "good", model, optimizer)
    found.append(all(map(torch.equal, whole(model, optimizer), stored)))
    optimizer.engine.close()
    return found


def load_after_unfreezing(rank: int, world: int, path: str) -> list[str]:
    """Saves, and loads into another model, of which rank 1 alone does not find the folder at first:
    what each rank meets in both."""
    folder = Path(path) / "saved"

    def build_and_unfreeze() -> tuple[nn.Module, hetero.HybridAdam]:
        model = RankNet()
        model.first.weight.requires_grad_(False)
        optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
        hetero.initialize(model, optimizer, {**BASE, **OPTIONS[3]})
        model.first.weight.requires_grad_(True)
        return model, optimizer

    model, optimizer = build_and_unfreeze()
    hetero.save(folder, model, optimizer)
    optimizer.engine.close()
    other, other_optimizer = build_and_unfreeze()
    found = []
    with ExitStack() as patches:
        if rank == 1:
            gone = hetero.CheckpointError("it is gone")
            name = "hetero.checkpoint.load.find_checkpoint"
            patches.enter_context(patch(name, side_effect=gone))
        found.append(told(lambda: hetero.load(folder, other, other_optimizer)))
    found.append(told(lambda: hetero.load(folder, other, other_optimizer)))
    other_optimizer.engine.close()
    return found


def die_in_save(rank: int, world: int, path: str) -> str:
    """Rank 1 is killed while it saves; what the others meet."""
    model, optimizer = build(rank, world, path, 0, {**OPTIONS[2], "rank_timeout_s": 20.0})
    steps(rank, model, optimizer, range(1))
    hetero.save(Path(path) / "saved", model, optimizer)
    if rank == 1:
        DataWriter.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    return told(lambda: hetero.save(Path(path) / "saved", model, optimizer))


def save_alone(rank: int, world: int, path: str) -> str:
    """The error of the first rank, whose save the other one does not make."""
    model, optimizer = build(rank, world, path, 0, {**OPTIONS[2], "rank_timeout_s": 3.0})
    mark, found = Path(path) / "told", ""
    if rank == 0:
        found = told(lambda: hetero.save(Path(path) / "saved", model, optimizer))
        mark.touch()
    until(mark.exists)
    optimizer.engine.close()
    return found
