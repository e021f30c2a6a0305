"""hetero: train PyTorch models whose state does not fit in memory, inside strict budgets.

Modules are imported when a name is used first (PEP 562), so that the command's --help and --version
need not import torch. __init__.pyi, which type checkers read, says where each name is.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: str(statement.module)
    for statement in _STUB.body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # All at once: process_memory counts what the process holds when a budget is made, and what is
    # imported later would come on top. But for torch.distributed.checkpoint, which takes as long to
    # import as half of torch: with process_memory the configuration imports it.
    for each, module in _MODULES.items():
        if each == name or not module.startswith("hetero.checkpoint.dcp."):
            globals()[each] = getattr(importlib.import_module(module), each)
    return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
