"""The loop of docs/checkpoints.md with a durable state, under torchrun; a rank may be killed in it.

    torchrun --max-restarts 1 -m tests.support.durable.elastic_loop FOLDER STEPS KILLED_STEP

Rank 1 of the first attempt is killed before that step; 0: none. The first rank writes where it
began, and the masters of the end, to FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

import hetero
from tests.support.training.small_net import Net, loss_of


def main(folder: Path, steps: int, killed_step: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, first_try = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = Net()
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-3)
    model, optimizer = hetero.initialize(
        model,
        optimizer,
        placement_policy="nvme",
        nvme_path=str(folder),
        host_memory="1MiB",
        chunk_numel=8192,
        durable=True,
        commit_every=0,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    last = hetero.resume(model, extra={"scheduler": scheduler})
    begin = last.extra["step"] if last else 0
    for step in range(begin, steps):
        if first_try and rank == 1 and step == killed_step > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        # (All ranks have the same data, so that one rank alone goes on with the same numbers.)
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        hetero.commit(model, extra={"scheduler": scheduler, "step": step + 1})
    masters = hetero.masters(model.parameters())
    if rank == 0:
        with (folder / "begins").open("a") as stream:
            stream.write(json.dumps([begin, int(os.environ["WORLD_SIZE"])]) + "\n")
        torch.save(masters, folder / "masters.pt")
    optimizer.engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
