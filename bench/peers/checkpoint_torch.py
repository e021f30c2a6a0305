"""PyTorch's checkpoints of a model and its AdamW in RAM. A peer of bench.checkpoint (see serve.py).

Weights and moments are fp32 (12 bytes a parameter), and compute is in bf16 by autocast. "torch" is
torch.save() of both state_dict()s to one file, with fsync, and torch.load(); "dcp" is
torch.distributed.checkpoint in one process, whose files it syncs itself, too: save(), load(), and
async_save(). Pages of the files are dropped before loads. Each save is to a new file or folder.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from bench.peers.checkpoint_timing import drop_pages, files_bytes, steps_beside, timed
from bench.peers.serve import serve
from bench.peers.training.torch_peer import TorchPeer, build_model
from bench.peers.training.workload import Workload


class CheckpointPeer:
    """Set-up: {"workload": a file, "folder": for checkpoints}. Requests: {"what", "how"}.

    `what`: "save" or "load" gives {"s", "gbps", "bytes", "above_bytes"}; "beside", see
    steps_beside(); "step", of {"steps"} in a row, {"step_s", "above_bytes"}. `how`: "torch" or
    "dcp".
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        # That there is no other rank to save with is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        workload = Workload.read(Path(setup["workload"]))
        torch.set_num_threads(workload.threads)
        self._workload = workload
        self._folder = Path(setup["folder"])
        self._peer = TorchPeer(build_model(workload), workload, autocast=True)
        self._batches = _again_and_again(workload)
        self._step()
        self.info: dict[str, Any] = {"torch": torch.__version__, "params": self._peer.params}

    def sample(self, request: dict[str, Any]) -> dict[str, float]:
        what = request["what"]
        if what == "step":
            self._step()
            steps: int = request["steps"]
            figures = timed(lambda: self._make_steps(steps))
            return {"step_s": figures["s"] / steps, "above_bytes": figures["above_bytes"]}
        path = self._folder / request["how"]
        if what == "load":
            drop_pages(path)
            return self._with_rate(timed(self._of("load", request["how"], path)), path)
        # A new one, instead of the files of the save before, which have their space already.
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        if what == "beside":
            self._step()
            return steps_beside(lambda: self._begin_dcp_save(path), self._step)
        return self._with_rate(timed(self._of("save", request["how"], path)), path)

    @staticmethod
    def _with_rate(figures: dict[str, float], path: Path) -> dict[str, float]:
        nbytes = files_bytes(path)
        return {**figures, "bytes": nbytes, "gbps": nbytes / figures["s"] / 1e9}

    def _of(self, what: str, how: str, path: Path) -> Callable[[], None]:
        function: Callable[[Path], None] = getattr(self, f"_{what}_{how}")
        return lambda: function(path)

    def _make_steps(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        micro_batches = next(self._batches)
        for tokens in micro_batches:
            loss = self._peer.forward(tokens)
            loss.item()
            self._peer.backward(loss)
            self._peer.step(self._workload.lrs[0], last=tokens is micro_batches[-1])

    def _save_torch(self, path: Path) -> None:
        state = {
            "model": self._peer.model.state_dict(),
            "optimizer": self._peer.optimizer.state_dict(),
        }
        with (path / "state.pt").open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def _load_torch(self, path: Path) -> None:
        state = torch.load(path / "state.pt", weights_only=True)
        self._peer.model.load_state_dict(state["model"])
        self._peer.optimizer.load_state_dict(state["optimizer"])

    def _save_dcp(self, path: Path) -> None:
        save(self._dcp_state(), checkpoint_id=path)

    def _load_dcp(self, path: Path) -> None:
        state = self._dcp_state()
        load(state, checkpoint_id=path)
        set_state_dict(
            self._peer.model,
            self._peer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _begin_dcp_save(self, path: Path) -> Callable[[], object]:
        saving: Any = async_save(self._dcp_state(), checkpoint_id=path)
        wait: Callable[[], object] = saving.result
        return wait

    def _dcp_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._peer.model, self._peer.optimizer)
        return {"model": model, "optimizer": optimizer}


def _again_and_again(workload: Workload) -> Iterator[list[torch.Tensor]]:
    while True:
        yield from workload.batches()


if __name__ == "__main__":
    sys.exit(serve(CheckpointPeer))
