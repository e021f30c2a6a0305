"""Module paths of other projects, where hetero's modules have other names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def mirrored(path: str, modules: Mapping[str, ModuleType]) -> Any:
    """Puts modules of hetero's under other names into a package, whose imports find them.

    Args:
        path: of the package. Unless it is being imported it is made, without a file, and its parent
            is being imported.
        modules: by their paths in the package; a module comes before those below it.

    Returns:
        The package.
    """
    package = sys.modules.get(path)
    if package is None:
        package = ModuleType(path, "Modules of hetero's under the names of another project.")
        package.__spec__ = ModuleSpec(path, None, is_package=True)
        package.__package__, package.__path__ = path, []
        sys.modules[path] = package
    for name, module in modules.items():
        sys.modules[f"{path}.{name}"] = module
        above, _, last = name.rpartition(".")
        setattr(modules[above] if above else package, last, module)
    return package
