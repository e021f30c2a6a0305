"""One round of checkpoints of a model whose state is in RAM, by PyTorch.

usage: python -m bench.peers.checkpoint torch|dcp FOLDER STEPS, as bench.checkpoint calls it

FOLDER has workload.json. Prints one JSON object. Weights and moments are fp32 (12 bytes a
parameter), and compute is in bf16 by autocast. "torch" is torch.save() of both state_dict()s to
one file, with fsync, and torch.load(); "dcp" is torch.distributed.checkpoint in one process, whose
files it syncs itself, too: save(), load(), and async_save() with steps beside it. Pages of the
files are dropped before loads.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from bench.peers.timing import drop_pages, steps_beside, timed, with_rate
from bench.peers.train import TorchPeer
from bench.peers.workload import Workload


class CheckpointPeer:
    """A training of the folder's workload, which is saved to `folder` and loaded."""

    def __init__(self, folder: Path, way: str) -> None:
        # That there is no other rank to save with is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        self._workload = workload = Workload.read(folder / "workload.json")
        torch.set_num_threads(workload.threads)
        self.path = folder / way
        self.peer = TorchPeer(workload, "autocast")
        self._way = way
        self._batches = itertools.chain.from_iterable(workload.batches() for _ in itertools.count())

    def step(self) -> None:
        """Makes a step."""
        micro_batches = next(self._batches)
        for tokens in micro_batches:
            loss = self.peer.forward(tokens)
            loss.item()
            self.peer.backward(loss)
            self.peer.step(self._workload.lrs[0], last=tokens is micro_batches[-1])

    def round(self, steps: int) -> dict[str, float]:
        """The figures of a save and a load, and of dcp's `steps` alone and beside a save."""
        self.step()
        self._begin_anew()
        found = {f"save_{name}": value for name, value in self._rated(self.save).items()}
        drop_pages(self.path)
        found |= {f"load_{name}": value for name, value in self._rated(self.load).items()}
        if self._way == "dcp":
            begin_s = time.perf_counter()
            for _ in range(steps):
                self.step()
            found["alone_step_s"] = (time.perf_counter() - begin_s) / steps
            self._begin_anew()
            found |= steps_beside(self._begin_save, self.step)
        shutil.rmtree(self.path)
        return {name: float(value) for name, value in found.items()}

    def _begin_anew(self) -> None:
        """A new folder, instead of the files of the save before, which have their space already."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()

    def _rated(self, body: Callable[[], object]) -> dict[str, float]:
        return with_rate(timed(body), self.path)

    def save(self) -> None:
        """Returns when all is on the disk."""
        if self._way == "dcp":
            save(self._state(), checkpoint_id=self.path)
            return
        model, optimizer = self.peer.model.state_dict(), self.peer.optimizer.state_dict()
        with (self.path / "state.pt").open("wb") as stream:
            torch.save({"model": model, "optimizer": optimizer}, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def load(self) -> None:
        """Gives model and optimizer what save() saved."""
        if self._way == "dcp":
            state = self._state()
            load(state, checkpoint_id=self.path)
            given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.peer.model, self.peer.optimizer, **given)
            return
        state = torch.load(self.path / "state.pt", weights_only=True)
        self.peer.model.load_state_dict(state["model"])
        self.peer.optimizer.load_state_dict(state["optimizer"])

    def _begin_save(self) -> Callable[[], object]:
        saving: Any = async_save(self._state(), checkpoint_id=self.path)
        wait: Callable[[], object] = saving.result
        return wait

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.peer.model, self.peer.optimizer)
        return {"model": model, "optimizer": optimizer}


def main(argv: list[str]) -> int:
    way, folder, steps = argv
    print(json.dumps(CheckpointPeer(Path(folder), way).round(int(steps))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
