"""Reads DeepSpeed's universal checkpoints: a folder of files for each parameter.

The folder has zero/NAME/fp32.pt and one file for each state, NAME.pt. A file has a tensor, or a
dict with it under "param". They are pickles, of which tensors and plain data are read.
"""

from __future__ import annotations

import re
import reprlib
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint.manifest import (
    GroupRecord,
    OptimizerRecord,
    ParamRecord,
    TensorRecord,
    master_key,
    state_key,
)
from hetero.checkpoint.optimizer_guess import optimizer_class
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint, make_manifest
from hetero.checkpoint.torch_file import check_memory, load_plain
from offload.errors import CheckpointError

_MASTER, _STEP = "fp32.pt", "step.pt"


def universal_folder(path: Path) -> Path | None:
    """The folder with one folder for each parameter, if `path` is a universal checkpoint."""
    for folder in (path / "zero", path):
        if folder.is_dir() and any(folder.glob(f"*/{_MASTER}")):
            return folder
    return None


class DeepspeedCheckpoint(StoredCheckpoint):
    """Masters and optimizer states by name; no buffers, and no options of param groups."""

    kind = "DeepSpeed universal checkpoint"

    def __init__(self, path: Path, folder: Path) -> None:
        """Reads shapes and steps. Raises CheckpointError."""
        super().__init__(path)
        self._last: tuple[str, torch.Tensor] | None = None
        self._paths: dict[str, Path] = {}
        tensors: dict[str, TensorRecord] = {}
        states: dict[str, TensorRecord] = {}
        steps: dict[str, int] = {}
        found: set[str] = set()
        folders = [each for each in folder.iterdir() if (each / _MASTER).is_file()]
        for each in sorted(folders, key=lambda each: _natural(each.name)):
            name = each.name
            self._paths[master_key(name)] = each / _MASTER
            tensors[name] = self._record(each / _MASTER)
            steps[name] = 0
            for file in sorted(each.glob("*.pt")):
                if file.name == _STEP:
                    steps[name] = _step(file)
                elif file.name != _MASTER:
                    record = self._record(file)
                    if record.shape != tensors[name].shape:
                        continue  # (no state of the update's)
                    self._paths[state_key(name, file.stem)] = file
                    states[state_key(name, file.stem)] = record
                    found.add(file.stem)
        kind = optimizer_class({}, found) if found else None
        records = []
        if kind is not None:
            # Without options: the optimizer that loads them keeps its own.
            group = GroupRecord({}, tuple(tensors))
            names = tuple(kind.state_names)
            records = [OptimizerRecord(kind.__name__, names, "fp32", (group,))]
            missing = [n for n in tensors for s in names if state_key(n, s) not in states]
            if missing:
                raise CheckpointError(f"{folder / missing[0]} lacks one of {', '.join(names)}")
        params = {n: ParamRecord((), kind is not None, steps[n]) for n in tensors}
        self.manifest = make_manifest(tensors, params, records, states)
        self.files = {
            str(file.relative_to(path)): file.stat().st_size for file in self._paths.values()
        }
        self.notes.append(
            "options of param groups, buffers and frozen parameters are not in what is read here"
        )

    def _record(self, path: Path) -> TensorRecord:
        tensor = _tensor(path)
        return TensorRecord(tuple(tensor.shape), tensor.dtype)

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """See StoredCheckpoint."""
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = (key, _tensor(self._paths[key]).reshape(-1))
        return self._last[1][begin:end].clone()

    def close(self) -> None:
        """See StoredCheckpoint."""
        self._last = None


def _natural(name: str) -> list[Any]:
    """So that layer 10 comes after layer 9."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", name)]


def _tensor(path: Path) -> torch.Tensor:
    found = load_plain(path, str(path))
    if isinstance(found, dict):
        found = found.get("param")
    if not isinstance(found, torch.Tensor) or not found.dtype.is_floating_point:
        raise CheckpointError(f"{path} has no tensor of floating-point numbers")
    check_memory(found, str(path))
    return found


def _step(path: Path) -> int:
    found = load_plain(path, str(path))
    if isinstance(found, dict):
        found = found.get("param", found.get("step"))
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    if not isinstance(found, (int, float)) or not 0 <= found < 2**53:
        raise CheckpointError(f"{path} has the step {reprlib.repr(found)}")
    return int(found)
