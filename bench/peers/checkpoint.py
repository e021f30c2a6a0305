"""Checkpoints of a model whose state is in RAM by PyTorch, or by DeepSpeed. A peer of
bench.checkpoint (see serve.py); its argument is torch or deepspeed.

Weights and moments are fp32 (12 bytes a parameter), and compute is in bf16 by autocast. "torch" is
torch.save() of both state_dict()s to one file, with fsync, and torch.load(); "dcp" is
torch.distributed.checkpoint in one process, whose files it syncs itself, too: save(), load(), and
async_save(). "deepspeed" is ZeRO-3 with parameters and optimizer state offloaded to the CPU, which
saves masters and moments: save_checkpoint(), with fsync of its files, because it does not wait for
the disk itself, and load_checkpoint(). Pages of the files are dropped before loads. Each save is to
a new file or folder.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from bench.peers.serve import serve
from bench.peers.timing import drop_pages, steps_beside, timed, with_rate
from bench.peers.train import PEERS
from bench.peers.workload import Workload

_TAG = "now"  # of DeepSpeed's


class CheckpointPeer:
    """Set-up: {"workload": a file, "folder": for checkpoints}. Requests: {"what", "how"}.

    `what`: "save" or "load" gives {"s", "gbps", "bytes", "above_bytes"}; "beside", see
    steps_beside(); "step", of {"steps"} in a row, {"step_s", "above_bytes"}. `how`: "torch", "dcp"
    or "deepspeed".
    """

    def __init__(self, setup: dict[str, Any], library: str = "torch") -> None:
        # That there is no other rank to save with is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        self._workload = workload = Workload.read(Path(setup["workload"]))
        torch.set_num_threads(workload.threads)
        self._folder = Path(setup["folder"])
        mode = "autocast" if library == "torch" else "cpu"
        self.peer: Any = PEERS[library](workload, mode, setup["folder"])
        self._batches = itertools.chain.from_iterable(workload.batches() for _ in itertools.count())
        self._step()
        version = {"torch": torch.__version__}
        self.info: dict[str, Any] = {**version, **self.peer.versions, "params": self.peer.params}

    def sample(self, request: dict[str, Any]) -> dict[str, float]:
        what = request["what"]
        if what == "step":
            self._step()
            steps: int = request["steps"]
            figures = timed(lambda: self._make_steps(steps))
            return {"step_s": figures["s"] / steps, "above_bytes": figures["above_bytes"]}
        path, ways = self._folder / request["how"], _WAYS[request["how"]]
        if what == "load":
            drop_pages(path)
            return with_rate(timed(lambda: ways[1](self.peer, path)), path)
        # A new one, instead of the files of the save before, which have their space already.
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        if what == "beside":
            self._step()
            return steps_beside(lambda: _begin_dcp_save(self.peer, path), self._step)
        return with_rate(timed(lambda: ways[0](self.peer, path)), path)

    def _make_steps(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        micro_batches = next(self._batches)
        for tokens in micro_batches:
            loss = self.peer.forward(tokens)
            loss.item()
            self.peer.backward(loss)
            self.peer.step(self._workload.lrs[0], last=tokens is micro_batches[-1])


def _save_torch(peer: Any, path: Path) -> None:
    state = {"model": peer.model.state_dict(), "optimizer": peer.optimizer.state_dict()}
    with (path / "state.pt").open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _load_torch(peer: Any, path: Path) -> None:
    state = torch.load(path / "state.pt", weights_only=True)
    peer.model.load_state_dict(state["model"])
    peer.optimizer.load_state_dict(state["optimizer"])


def _dcp_state(peer: Any) -> dict[str, Any]:
    model, optimizer = get_state_dict(peer.model, peer.optimizer)
    return {"model": model, "optimizer": optimizer}


def _save_dcp(peer: Any, path: Path) -> None:
    save(_dcp_state(peer), checkpoint_id=path)


def _begin_dcp_save(peer: Any, path: Path) -> Callable[[], object]:
    saving: Any = async_save(_dcp_state(peer), checkpoint_id=path)
    wait: Callable[[], object] = saving.result
    return wait


def _load_dcp(peer: Any, path: Path) -> None:
    state = _dcp_state(peer)
    load(state, checkpoint_id=path)
    model, optimizer = state["model"], state["optimizer"]
    given = {"model_state_dict": model, "optim_state_dict": optimizer}
    set_state_dict(peer.model, peer.optimizer, **given)


def _save_deepspeed(peer: Any, path: Path) -> None:
    peer.engine.save_checkpoint(str(path), tag=_TAG)
    for each in path.rglob("*"):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _load_deepspeed(peer: Any, path: Path) -> None:
    loaded, _ = peer.engine.load_checkpoint(str(path), tag=_TAG)
    if loaded is None:
        raise OSError(f"DeepSpeed loaded nothing from {path}")


_Way = Callable[[Any, Path], None]
_WAYS: dict[str, tuple[_Way, _Way]] = {
    "torch": (_save_torch, _load_torch),
    "dcp": (_save_dcp, _load_dcp),
    "deepspeed": (_save_deepspeed, _load_deepspeed),
}

if __name__ == "__main__":
    sys.exit(serve(lambda setup: CheckpointPeer(setup, *sys.argv[1:])))
