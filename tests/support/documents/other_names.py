"""Code of documents for other projects, run by the adapters in their place."""

from __future__ import annotations

import importlib
import sys

import pytest

_PROJECTS = {
    "deepspeed": "hetero.compat.deepspeed",
    "colossalai": "hetero.compat.colossalai",
    "torch.distributed.fsdp": "hetero.compat.fsdp",
}
_BELOW = ("zero", "nn", "nn.optimizer", "booster", "booster.plugin")


def stand_in(monkeypatch: pytest.MonkeyPatch, project: str) -> None:
    """Imports of `project`, and of modules of it, find the adapter."""
    adapter = _PROJECTS[project]
    monkeypatch.setitem(sys.modules, project, importlib.import_module(adapter))
    for name in _BELOW:
        try:
            found = importlib.import_module(f"{adapter}.{name}")
        except ModuleNotFoundError:
            continue
        monkeypatch.setitem(sys.modules, f"{project}.{name}", found)
