"""Looking at managed parameters, changing them, and clipping their gradients, from user code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from hetero.api.whole_state import export_masters, store_values
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from offload.errors import UnmanagedParameterError

Params = torch.Tensor | Iterable[torch.Tensor]


def _listed(params: Params) -> list[torch.Tensor]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def engine_of(params: Params) -> Engine:
    """The engine that manages `params`. Raises UnmanagedParameterError if none or several do."""
    engines = {id(e): e for p in _listed(params) if (e := getattr(p, "_hetero_engine", None))}
    if len(engines) != 1:
        raise UnmanagedParameterError(
            f"the parameters given belong to {len(engines)} engines, not one; pass the parameters "
            f"of one model that went through hetero.initialize()"
        )
    engine: Engine = next(iter(engines.values()))
    return engine


@contextmanager
def gathered(params: Params, modifier_rank: int | None = None) -> Iterator[None]:
    """Inside the block the parameters are present, in the compute dtype.

    With `modifier_rank` (0 for one process) they may be changed in place; at the end of the block
    that rank's values go home on all ranks, which must all enter, and the fp32 master of each
    changed element becomes its new value. For the length of the block the copies to be changed are
    in RAM outside the budgets. If the block raises, nothing is changed. Without it any rank may
    enter alone.

    Raises UnmanagedParameterError for parameters of no engine, BudgetError if they do not fit.
    """
    listed = _listed(params)
    if not listed:
        yield
        return
    engine = engine_of(listed)
    engine.unwind()
    members = list({m.param: m for m in engine.find_all(listed)}.values())
    with engine.params.present(members):
        if modifier_rank is None:
            yield
            return
        changed: dict[ManagedParam, torch.Tensor] = {}
        with _replaced_by_copies(members, changed):
            yield
    store_values(engine, _values_of(engine, changed, modifier_rank))


def _values_of(
    engine: Engine, mine: Mapping[ManagedParam, torch.Tensor], root: int
) -> Mapping[ManagedParam, torch.Tensor]:
    """The values that rank `root` has for the parameters of which this one has `mine`."""
    everyone, world = engine.world.everyone, engine.world
    if not 0 <= root < world.size:
        raise ValueError(
            f"modifier_rank must be one of the {world.size} ranks, 0 to {world.size - 1}, not "
            f"{root}"
        )
    if everyone is None:
        return mine
    shared = {managed: value.contiguous() for managed, value in mine.items()}
    for managed, value in shared.items():
        everyone.broadcast(value, root, f"changing {managed.name}")
    return shared


@contextmanager
def _replaced_by_copies(
    members: list[ManagedParam], changed: dict[ManagedParam, torch.Tensor]
) -> Iterator[None]:
    """Inside the block the parameters are copies, which are in `changed` if it ends well."""
    with ExitStack() as copies:
        for m in members:
            copies.enter_context(m.as_copy())
        yield
        changed.update({m: m.param.data for m in members})


def masters(params: Params) -> list[torch.Tensor]:
    """The fp32 master weights of `params`, whole, in RAM outside the budgets."""
    listed = _listed(params)
    found = export_masters(engine_of(listed), listed)
    return [found[p] if p in found else p.detach().float() for p in listed]


def grads(params: Params) -> list[torch.Tensor | None]:
    """The gradients of `params` as the next step will use them: unscaled, as far as clipped.

    Copies in fp32 (in which the step multiplies by the loss scale's and clipping's factor; fp16
    could not hold them), whole, in RAM outside the budgets. None where there is no gradient. To
    change a gradient, assign `.grad`: the tensor is taken in when clipping or the step needs it.
    """
    listed = _listed(params)
    if not listed:
        return []
    engine = engine_of(listed)
    found = {id(m.param): engine.grad_factors.read(m) for m in engine.with_grads(listed)}
    return [found.get(id(p)) for p in listed]


def clip_grad_norm_(
    parameters: Params,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ for managed parameters; returns the norm before clipping.

    torch's own works too; this one sums in double, per parameter in a fixed order, so the norm does
    not depend on the placement. `norm_type` is 2 or inf. What the chunks keep is not touched: the
    step multiplies by the factor, in fp32. Several calls multiply, also for some parameters only.
    Call it after the last backward of a step: what is added later is not clipped.

    Raises ValueError for another norm, NonFiniteError (with `error_if_nonfinite`) for an infinite
    or NaN norm.
    """
    if norm_type not in (2, math.inf):
        raise ValueError(f"norm_type must be 2 or inf, not {norm_type}")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    listed = _listed(parameters)
    engine = engine_of(listed)
    norm = engine.grad_factors.clip_norm(
        engine.with_grads(listed), max_norm, norm_type, error_if_nonfinite
    )
    return torch.tensor(norm, dtype=torch.float32)


def clip_grad_value_(parameters: Params, clip_value: float) -> None:
    """torch.nn.utils.clip_grad_value_ for managed parameters: each element to +-`clip_value`.

    The limit is of unscaled gradients; what the chunks keep is clamped in the grad dtype, so
    gradients homed on NVMe are read and written. Under fp16 with hetero's loss scale, a gradient
    that overflowed is left alone: its step will be skipped.

    Raises ValueError for a negative limit.
    """
    if not clip_value >= 0:
        raise ValueError(f"clip_value must be 0 or more, not {clip_value}")
    listed = _listed(parameters)
    engine = engine_of(listed)
    engine.grad_factors.clamp(engine.with_grads(listed), -clip_value, clip_value)


def no_sync(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Inside the block gradients are only added up on each rank, as with DDP's no_sync().

    They are averaged with those of the first backward outside. Until then they are kept whole, in
    stages 2 and 3 in addition to the shards, within host_memory (BudgetError if there is no room).
    With early_updates it says that more gradients of the step will come; otherwise it changes
    nothing with one rank.
    """
    return engine_of(model.parameters()).no_sync()
