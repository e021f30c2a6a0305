"""DeepSpeed's checkpoints of a model whose state is in RAM. A peer of bench.checkpoint (see
serve.py).

ZeRO-3 with parameters and optimizer state offloaded to the CPU; what is saved are masters and
moments in fp32 (12 bytes a parameter). save_checkpoint(), with fsync of its files, because it does
not wait for the disk itself; load_checkpoint(), with the pages of the files dropped before.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from bench.peers.checkpoint_timing import drop_pages, files_bytes, timed
from bench.peers.deepspeed_world import start_world
from bench.peers.serve import serve
from bench.peers.training.deepspeed_train import DeepSpeedPeer
from bench.peers.training.workload import Workload

_TAG = "now"


class DeepSpeedCheckpointPeer:
    """Set-up: {"workload": a file, "folder": for checkpoints}. Requests: {"what": "save" or "load"}
    give {"s", "gbps", "bytes", "above_bytes"}."""

    def __init__(self, setup: dict[str, Any]) -> None:
        workload = Workload.read(Path(setup["workload"]))
        torch.set_num_threads(workload.threads)
        self._path = Path(setup["folder"]) / "deepspeed"
        deepspeed = start_world()
        self._peer = DeepSpeedPeer(deepspeed, workload, "cpu", Path(setup["folder"]))
        for tokens in next(iter(workload.batches())):
            self._peer.backward(self._peer.forward(tokens))
            self._peer.step(workload.lrs[0], last=True)
        self.info: dict[str, Any] = {"deepspeed": self._peer.version, "params": self._peer.params}

    def sample(self, request: dict[str, Any]) -> dict[str, float]:
        if request["what"] == "load":
            drop_pages(self._path)
            figures = timed(self._load)
        else:
            shutil.rmtree(self._path, ignore_errors=True)
            figures = timed(self._save)
        nbytes = files_bytes(self._path)
        return {**figures, "bytes": nbytes, "gbps": nbytes / figures["s"] / 1e9}

    def _save(self) -> None:
        self._peer.engine.save_checkpoint(str(self._path), tag=_TAG)
        for path in self._path.rglob("*"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def _load(self) -> None:
        loaded, _ = self._peer.engine.load_checkpoint(str(self._path), tag=_TAG)
        if loaded is None:
            raise OSError(f"DeepSpeed loaded nothing from {self._path}")


if __name__ == "__main__":
    sys.exit(serve(DeepSpeedCheckpointPeer))
