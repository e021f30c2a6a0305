"""Module paths of other projects, where hetero's modules have other names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def mirrored(path: str, modules: Mapping[str, ModuleType]) -> Any:
    """Makes a package whose modules are modules of hetero's.

    Args:
        path: of the package, which has no file; its parent is being imported.
        modules: by their paths in the package; a module comes before those below it.

    Returns:
        The package; imports of it and of its modules find them.
    """
    package = ModuleType(path, "Modules of hetero's under the names of another project.")
    package.__spec__ = ModuleSpec(path, None, is_package=True)
    package.__package__, package.__path__ = path, []
    sys.modules[path] = package
    for name, module in modules.items():
        sys.modules[f"{path}.{name}"] = module
        above, _, last = name.rpartition(".")
        setattr(modules[above] if above else package, last, module)
    return package
