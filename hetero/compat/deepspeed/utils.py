"""deepspeed.utils: whole masters, gradients and states of parameters, marks, and OnDevice.

A parameter's fp32 master, gradient and optimizer states are read and changed as whole tensors. With
several ranks all call each function for the same parameters, in one order. A "local" tensor is the
part that DeepSpeed's stage 3 would have on this rank: as many elements of the flat tensor for each
rank, zeros at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hetero.api.access import grads, masters
from hetero.api.whole_state import export_states, import_states, store_values
from hetero.checkpoint.engine_checkpoint import STATE_NAMES
from hetero.compat.key_table import log_not_needed
from hetero.compat.key_table import logger as logger
from hetero.compat.ranks import rank, ranks
from hetero.runtime.engine import Engine

_MARK = "_z3_leaf"
Found = torch.Tensor | None


def _engine(param: torch.Tensor) -> Engine | None:
    """The engine that trains a parameter."""
    engine: Engine | None = getattr(param, "_hetero_engine", None)
    return engine if engine is not None and engine.find(param).chunk.trainable else None


def safe_get_full_fp32_param(param: torch.Tensor) -> Found:
    """A copy of the fp32 master; None if the parameter is not trained by hetero."""
    return None if _engine(param) is None else masters(param)[0]


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces the fp32 master; the parameter becomes what it rounds to."""
    engine = _engine(param)
    if engine is not None:
        store_values(engine, {engine.find(param): value.float()})


def _states(param: torch.Tensor) -> tuple[Sequence[str], dict[str, torch.Tensor]]:
    """The names of an optimizer's states, and a parameter's own; none if hetero has none."""
    engine = _engine(param)
    optimizer = None if engine is None else engine.steps.optimizer_of(param)
    if engine is None or optimizer is None:
        return (), {}
    names = STATE_NAMES[optimizer.dtypes.rule]
    return names, export_states(engine, [param], names)[param]


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> Found:
    """A copy of one state in fp32, as "exp_avg"; None if there is no such state."""
    return _states(param)[1].get(optim_state_key)


def safe_set_full_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Replaces one state. Raises ValueError if the optimizer has no such state."""
    engine, (names, states) = _engine(param), _states(param)
    if engine is None or not names:
        return
    if optim_state_key not in names:
        raise ValueError(f"there is no state {optim_state_key!r}; there are {', '.join(names)}")
    import_states(engine, {param: {**states, optim_state_key: value}}, names)


def safe_get_full_grad(param: torch.Tensor) -> Found:
    """A copy of the gradient, averaged over ranks, in the dtype that gradients are kept in.

    Under fp16 it is times the loss scale. None if there is none.
    """
    engine = getattr(param, "_hetero_engine", None)
    if engine is None:
        return param.grad
    found = grads(param)[0]
    optimizer = engine.steps.optimizer_of(param)
    return found if found is None or optimizer is None else found.to(optimizer.dtypes.torch_grad)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces the gradient, which is the same on all ranks."""
    engine = _engine(param)
    if engine is None:
        param.grad = value
    else:
        engine.steps.grad_factors.replace(engine.find(param), value.to(param.dtype))


def safe_update_full_grad_vectorized(
    param_list: Sequence[torch.Tensor],
    update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replaces each gradient that there is by update_func(gradient, parameter)."""
    for param in param_list:
        found = safe_get_full_grad(param)
        if found is not None:
            safe_set_full_grad(param, update_func(found, param))


def _local_get(get: Callable[..., Found]) -> Callable[..., Found]:
    """Gets this rank's part of what `get` gets."""

    def part(param: torch.Tensor, *key: Any, **named: Any) -> Found:
        whole = get(param, *key, **named)
        if whole is None:
            return None
        numel = -(-whole.numel() // ranks())
        mine = whole.reshape(-1)[rank() * numel : (rank() + 1) * numel]
        return torch.nn.functional.pad(mine, (0, numel - mine.numel()))

    return part


def _local_set(replace: Callable[..., None]) -> Callable[..., None]:
    """Replaces this rank's part of what `replace` replaces, and raises as that does."""

    def set_part(param: torch.Tensor, value: torch.Tensor, *key: Any, **named: Any) -> None:
        parts = [value] * ranks()
        if ranks() > 1:
            parts = [torch.empty_like(value) for _ in range(ranks())]
            dist.all_gather(parts, value.contiguous())
        replace(param, torch.cat(parts)[: param.numel()].view(param.shape), *key, **named)

    return set_part


safe_get_local_fp32_param = _local_get(safe_get_full_fp32_param)
safe_get_local_grad = _local_get(safe_get_full_grad)
safe_get_local_optimizer_state = _local_get(safe_get_full_optimizer_state)
safe_set_local_fp32_param = _local_set(safe_set_full_fp32_param)
safe_set_local_grad = _local_set(safe_set_full_grad)
safe_set_local_optimizer_state = _local_set(safe_set_full_optimizer_state)


# Leaf modules, whose parameters DeepSpeed gathers together: marks can be set and asked for.


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """Whether a module is marked."""
    return getattr(model, _MARK, False)


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: torch.nn.Module, flag: bool) -> None:
    """Marks a module, or takes its mark away."""
    log_not_needed("set_z3_leaf_modules", "parameters come in wherever they are used")
    setattr(model, _MARK, flag)


def _marking(argument: str, is_meant: Callable[..., bool], flag: bool = True) -> Any:
    """The function that marks the modules that its second `argument` lists, and returns them."""

    def mark(
        model: torch.nn.Module, given: Any = None, raise_if_not_found: bool = True, **named: Any
    ) -> list[torch.nn.Module]:
        """Raises ValueError if there is none, unless raise_if_not_found is False."""
        wanted = list(named[argument] if given is None else given)
        paths = model.named_modules()
        found = [m for path, m in paths if any(is_meant(m, path, each) for each in wanted)]
        if raise_if_not_found and not found:
            raise ValueError(f"no module of the model is one of {wanted}")
        for module in found:
            set_z3_leaf_module(module, flag)
        return found

    return mark


def _is_of_class(module: torch.nn.Module, _: str, given: Any) -> bool:
    kind = type(module)
    if isinstance(given, str):
        return given in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, given)


set_z3_leaf_modules = _marking("leaf_module_classes", _is_of_class)
unset_z3_leaf_modules = _marking("leaf_module_classes", _is_of_class, flag=False)
set_z3_leaf_modules_by_name = _marking("module_names", lambda _, path, name: path == name)
set_z3_leaf_modules_by_suffix = _marking(
    "module_name_suffixes", lambda _, path, end: path.endswith(str(end))
)


@contextmanager
def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:
    """Inside the block tensors are made on `device`, floating-point ones with `dtype`.

    On "meta" none is made at all; with enabled=False the block does nothing.
    """
    before = torch.get_default_dtype()
    if not enabled:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
