"""One way to train, in a process of its own.

usage: python -m bench.activations.contender NAME SETTING PATH

Prints one JSON object: what bench.activations shows.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

import hetero
from bench.work.gpt import Gpt, Shape, checkpoint_blocks, fill, quick_init
from offload.memory.process_memory import peak_resident_bytes, resident_bytes

# So few that blocks have most of what is saved, and not the logits.
VOCABULARY = 8192
CONTENDERS = {
    "torch": "PyTorch",
    "torch-checkpoints": "PyTorch, each block a checkpoint",
    "torch-save-on-cpu": "PyTorch, save_on_cpu()",
    "hetero-off": "hetero, autograd keeps all",
    "hetero": "hetero, activation_memory",
    "hetero-checkpoints": "hetero, activation_memory, each block a checkpoint",
}


@dataclass(frozen=True)
class Setting:
    """What all contenders do."""

    shape: Shape
    steps: int
    activation_bytes: int
    host_bytes: int

    @classmethod
    def read(cls, text: str) -> Setting:
        """Of what to_json() wrote."""
        values = json.loads(text)
        return cls(Shape(**values.pop("shape")), **values)

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def _model(setting: Setting, checkpoints: bool) -> Gpt:
    with quick_init():
        model = Gpt(setting.shape, VOCABULARY)
    fill(model)
    if checkpoints:
        checkpoint_blocks(model)
    return model


def run(name: str, setting: Setting, path: str) -> dict[str, Any]:
    """Seconds, bytes and losses of a few steps. (The first one is not among the seconds.)"""
    checkpoints = name.endswith("checkpoints")
    if name.startswith("torch"):
        model: torch.nn.Module = _model(setting, checkpoints).bfloat16()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    else:
        memory = None if name == "hetero-off" else setting.activation_bytes
        with hetero.ZeroInitContext(
            placement_policy="nvme",
            nvme_path=path,
            host_memory=setting.host_bytes,
            activation_memory=memory,
        ):
            model = _model(setting, checkpoints)
        optimizer = hetero.HybridAdam(model.parameters(), lr=1e-4)
        model, optimizer = hetero.initialize(model, optimizer)
    shape = setting.shape
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (shape.batch_size, shape.seq_len), generator=generator)
    before_bytes = resident_bytes()
    losses, seconds = [], []
    for _ in range(setting.steps + 1):
        began_s = time.perf_counter()
        with save_on_cpu() if name == "torch-save-on-cpu" else nullcontext():
            loss = model(tokens)
        loss.backward()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began_s)
    result = {
        "step_s": median(seconds[1:]),
        "peak_bytes": peak_resident_bytes(),
        "before_bytes": before_bytes,
        "losses": losses,
        "written_bytes": 0.0,
        "read_bytes": 0.0,
    }
    if not name.startswith("torch"):
        engine = optimizer.engine
        moved = engine.traffic
        result["written_bytes"] = moved.activations_written / (setting.steps + 1)
        result["read_bytes"] = moved.activations_read / (setting.steps + 1)
        result["ledger_peak_bytes"] = engine.ledger.peak_bytes["host"]
        engine.close()
    return result


def main(argv: list[str]) -> int:
    """Prints the result of one contender."""
    name, setting, path = argv
    print(json.dumps(run(name, Setting.read(setting), path)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
