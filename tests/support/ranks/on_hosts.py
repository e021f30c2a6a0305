"""What ranks do that tests start on several hosts.

usage: python -m tests.support.ranks.on_hosts NAME OUT [PATH ...]

Each rank writes what the function NAME returns to the file OUT/NAME-RANK.json.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hetero
from hetero.ranks.process_groups import init_default_group
from tests.support.ranks.rank_training import told

OPTIONS: dict[str, Any] = {"dtype": "fp32", "placement_policy": "cpu", "rank_timeout_s": 60.0}


def _initialize(**options: Any) -> tuple[torch.nn.Module, hetero.HybridOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    made: tuple[torch.nn.Module, hetero.HybridOptimizer] = hetero.initialize(
        model, hetero.AdamW(model.parameters(), lr=1e-2), **{**OPTIONS, **options}
    )
    return made


def _train(
    model: torch.nn.Module, optimizer: hetero.HybridOptimizer, begin: int, end: int
) -> list[str]:
    """The losses of some steps, each rank with batches of its own, in all their bits."""
    losses = []
    for step in range(begin, end):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, 64)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def plain() -> dict[str, Any]:
    """A short training."""
    model, optimizer = _initialize()
    world = optimizer.engine.world
    losses = _train(model, optimizer, 0, 2)
    assert world.shard is not None
    sent_bytes = world.shard.sent_bytes
    optimizer.engine.close()
    return {"losses": losses, "local_ranks": world.local_ranks, "sent_bytes": sent_bytes}


def plain_of_rank(rank: int, world: int) -> dict[str, Any]:
    """The same on ranks of one machine that are there already."""
    return plain()


def until_lost(folder: str) -> str:
    """A short training, then, after a file `go` is there, a long one: the error that ends it."""
    rank = os.environ["RANK"]
    new = Path(folder, f"new-{rank}")
    new.write_text(json.dumps(plain()))
    new.rename(Path(folder, f"plain-{rank}"))
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    model, optimizer = _initialize(rank_timeout_s=5.0)

    def train() -> None:
        for step in range(1000):
            _train(model, optimizer, step, step + 1)
            Path(folder, f"{rank}-{step}").touch()

    Path(folder, f"until_lost-{rank}.json").write_text(json.dumps(told(train)))
    os._exit(0)  # the group of the ranks cannot end


def without_interface() -> dict[str, Any]:
    """The same, if nobody says which network interface it is to be."""
    del os.environ["GLOO_SOCKET_IFNAME"]
    return plain() | {"interface": os.environ.get("GLOO_SOCKET_IFNAME")}


def hybrid(steps: str) -> dict[str, Any]:
    """State is shared by two ranks in a row, and further ones have copies."""
    init_default_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    model, optimizer = _initialize(mesh=mesh)
    world = optimizer.engine.world
    losses = _train(model, optimizer, 0, int(steps))
    assert world.shard is not None
    assert world.replicas is not None
    found = {
        "losses": losses,
        "local_ranks": world.local_ranks,
        "reads_memory": [world.shard.reads_memory, world.replicas.reads_memory],
        "sent_bytes": [world.shard.sent_bytes, world.replicas.sent_bytes],
    }
    optimizer.engine.close()
    return found


def checkpoints(shared: str, own: str) -> dict[str, Any]:
    """Saves to a folder that all hosts see, and to one of which each host has its own."""
    model, optimizer = _initialize()
    rank = dist.get_rank()
    _train(model, optimizer, 0, 2)
    hetero.save(shared, model, optimizer)
    found: dict[str, Any] = {"then": _train(model, optimizer, 2, 4)}
    hetero.load(shared, model, optimizer)
    found["loaded"] = _train(model, optimizer, 2, 4)

    save = lambda: hetero.save(f"{own}/a", model, optimizer)  # noqa: E731
    load = lambda: hetero.load(f"{own}/a", model, optimizer)  # noqa: E731
    found["saved to separate ones"] = told(save)
    Path(own, ".a.incomplete").mkdir(exist_ok=True)  # as a crash would leave it
    found["saved beside leftovers"] = told(save)
    if rank == 0:
        shutil.copytree(shared, f"{own}/a")
    optimizer.engine.world.meet("copying")
    found["loaded where one sees it"] = told(load)
    if rank == 1:
        shutil.copytree(shared, f"{own}/a")
        Path(own, "a", "rank-0000-of-0002.safetensors").unlink()
    optimizer.engine.world.meet("copying")
    found["loaded where one sees its own file"] = told(load)
    if rank == 1:
        shutil.rmtree(f"{own}/a")
        shutil.copytree(shared, f"{own}/a")
    optimizer.engine.world.meet("copying")
    found["loaded copies"] = [told(load), _train(model, optimizer, 2, 4)]
    optimizer.engine.close()
    return found


def commits(nvme_path: str) -> dict[str, Any]:
    """Goes on from what was committed, if anything was, and commits two steps more."""
    options = {"placement_policy": "nvme", "nvme_path": nvme_path, "host_memory": "8MiB"}
    try:
        model, optimizer = _initialize(**options, durable=True, commit_every=0)
    except hetero.HeteroError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    resumed = hetero.resume(model)
    begin = 0 if resumed is None else int(resumed.extra["step"])
    losses = _train(model, optimizer, begin, begin + 2)
    hetero.commit(model, extra={"step": begin + 2}).wait()
    optimizer.engine.close()
    return {"begin": begin, "losses": losses}


def elastic(checkpoint_folder: str, marks: str, steps: str) -> dict[str, Any]:
    """Goes on from the last checkpoint; saves one every ten steps, and marks who was there.

    The last ten wait until there is a file `end` among the marks, and are made by whoever is there
    then.
    """
    init_default_group(timedelta(seconds=60))
    model, optimizer = _initialize(rank_timeout_s=5.0)
    size, rank = dist.get_world_size(), dist.get_rank()
    found = hetero.latest_checkpoint(checkpoint_folder)
    begin = 0 if found is None else hetero.load(found, model, optimizer).step
    Path(marks, f"{begin}-of-{size}-{rank}").touch()
    step = begin
    losses: list[str] = []
    while step < int(steps):
        world = optimizer.engine.world
        while step == int(steps) - 10 and not world.agree(
            Path(marks, "end").exists(), all, "waiting for the test"
        ):
            time.sleep(0.05)
        losses += _train(model, optimizer, step, step + 10)
        step += 10
        hetero.save(f"{checkpoint_folder}/step-{step}", model, optimizer, keep=100)
    optimizer.engine.close()
    return {"begin": begin, "size": size, "losses": losses}


def main(argv: list[str]) -> None:
    name, out, *arguments = argv
    found = globals()[name](*arguments)
    Path(out, f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
