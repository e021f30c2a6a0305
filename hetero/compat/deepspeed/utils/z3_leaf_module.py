"""Marks of modules whose parameters DeepSpeed gathers together; hetero has no use for them.

They can be set and asked for, so that code which does so runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hetero.compat.key_table import log_not_needed

_MARK = "_z3_leaf"
Modules = list[torch.nn.Module]


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """Whether a module is marked."""
    return getattr(model, _MARK, False)


def set_z3_leaf_module(model: torch.nn.Module, flag: bool) -> None:
    """Marks a module, or takes its mark away."""
    log_not_needed("set_z3_leaf_modules", "parameters come in wherever they are used")
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: torch.nn.Module) -> Modules:
    """The marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: torch.nn.Module,
    leaf_module_classes: Iterable[type[torch.nn.Module] | str],
    raise_if_not_found: bool = True,
) -> Modules:
    """Marks the modules of these classes, which may be given by their names.

    Returns:
        those that were found.

    Raises:
        ValueError: there is none.
    """
    return _mark(model, leaf_module_classes, _is_of, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module,
    leaf_module_classes: Iterable[type[torch.nn.Module] | str],
    raise_if_not_found: bool = True,
) -> Modules:
    """Takes the marks away that set_z3_leaf_modules() sets, and returns and raises as it does."""
    return _mark(model, leaf_module_classes, _is_of, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: torch.nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> Modules:
    """Marks the modules of these names in the model; else as set_z3_leaf_modules()."""
    return _mark(model, module_names, lambda _, path, name: path == name, True, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: torch.nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> Modules:
    """Marks the modules whose names end so; else as set_z3_leaf_modules()."""
    return _mark(
        model,
        module_name_suffixes,
        lambda _, path, end: path.endswith(str(end)),
        True,
        raise_if_not_found,
    )


def _is_of(module: torch.nn.Module, _: str, given: type[torch.nn.Module] | str) -> bool:
    kind = type(module)
    if isinstance(given, str):
        return given in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, given)


def _mark(
    model: torch.nn.Module,
    given: Iterable[type[torch.nn.Module] | str],
    is_meant: Callable[[torch.nn.Module, str, type[torch.nn.Module] | str], bool],
    flag: bool,
    must_find: bool,
) -> Modules:
    wanted = list(given)
    found = [m for path, m in model.named_modules() if any(is_meant(m, path, w) for w in wanted)]
    if must_find and not found:
        raise ValueError(f"no module of the model is one of {wanted}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found
