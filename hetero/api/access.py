"""What user code calls to read and change managed parameters, to clip gradients, and in blocks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from hetero.api.whole_state import export_masters, store_values
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.engine import Engine
from hetero.stand_ins.construction_uses import ConstructionParams, arena_of, note_written
from offload.errors import UnmanagedParameterError
from offload.interrupts import Uninterrupted, uninterrupted

Parameters = torch.Tensor | Iterable[torch.Tensor]


def _listed(params: Parameters) -> list[torch.Tensor]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def engine_of(params: Parameters) -> Engine:
    """Finds the engine that manages `params`.

    Raises:
        UnmanagedParameterError: they belong to no engine, or to several.
    """
    engines = {id(e): e for p in _listed(params) if (e := getattr(p, "_hetero_engine", None))}
    if len(engines) != 1:
        raise UnmanagedParameterError(
            f"the parameters given belong to {len(engines)} engines, not one; pass the parameters "
            f"of one model that went through hetero.initialize()"
        )
    engine: Engine = next(iter(engines.values()))
    engine.lifetime.unwind()
    return engine


def gathered(params: Parameters, modifier_rank: int | None = None) -> AbstractContextManager[None]:
    """Gathers parameters: inside the block they have their values, whole, in the compute dtype.

    Args:
        params: one managed parameter or several, of one model.
        modifier_rank: None (default): the values are for reading, and any rank may enter alone. A
            rank (0 if there is one process): values may be changed in place, and all ranks must
            enter. At the end of the block that rank's values become those of all ranks, and the
            fp32 master of each changed element becomes its new value. Inside the block the
            parameters are copies in memory that no budget counts. If the block raises, nothing is
            changed.

    Inside ZeroInitContext, and after it until hetero.initialize(), it does the same to the values
    in the dtype that they are built in; inside the block all ranks must enter. There values may be
    changed in place without a modifier_rank, too, by all ranks alike: initialize() raises
    HeteroError if what they have written differs.

    Raises:
        UnmanagedParameterError: a parameter belongs to no engine and no ZeroInitContext.
        HeteroError: between ZeroInitContext and hetero.initialize() each rank has a part only.
        BudgetError: the parameters do not fit in the slots for gathered parameters together.
    """
    return Uninterrupted(_gathered(_listed(params), modifier_rank))


@contextmanager
def _gathered(listed: list[torch.Tensor], modifier_rank: int | None) -> Iterator[None]:
    if not listed:
        yield
        return
    arena = arena_of(listed[0])
    if arena is not None and all(arena_of(p) is arena for p in listed):
        with _gathered_in_construction(arena, listed, modifier_rank):
            yield
        return
    engine = engine_of(listed)
    members = list({m.param: m for m in engine.find_all(listed)}.values())
    with engine.params.present(members):
        if modifier_rank is None:
            yield
            return
        with ExitStack() as copies:
            for m in members:
                copies.enter_context(m.as_copy())
            yield
            changed = {m: m.param.data for m in members}
    names = [m.name for m in changed]
    values = _values_of_rank(engine.world, list(changed.values()), names, modifier_rank)
    store_values(engine, dict(zip(changed, values, strict=True)))


@contextmanager
def _gathered_in_construction(
    arena: ConstructionParams, params: Sequence[torch.Tensor], modifier_rank: int | None
) -> Iterator[None]:
    """gathered() of parameters that hetero.initialize() has not placed yet."""
    unique = list({id(p): p for p in params}.values())
    with arena.present(unique) as own:
        if modifier_rank is None:
            # hetero.initialize() compares what ranks have written, if any did.
            before = [] if arena.world.everyone is None else [*map(_checksum, own)]
            yield
            for param, values, then in zip(unique, own, before, strict=False):
                if (now := _checksum(values)) != then:
                    note_written(param, now)
            return
        copies = [values.clone() for values in own]
        for param, copy in zip(unique, copies, strict=True):
            param.data = copy
        try:
            yield
            copies = [param.data for param in unique]
        finally:
            for param, values in zip(unique, own, strict=True):
                param.data = values
        names = [f"a parameter of shape {tuple(param.shape)}" for param in unique]
        changed = _values_of_rank(arena.world, copies, names, modifier_rank)
        for values, new in zip(own, changed, strict=True):
            values.copy_(new)
        for param in unique:
            note_written(param, 0)


def _checksum(values: torch.Tensor) -> int:
    """Of a parameter's values in RAM, never 0."""
    flat = values.detach().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data) or 1


def _values_of_rank(
    world: ProcessGroups, mine: Sequence[torch.Tensor], names: Sequence[str], root: int
) -> list[torch.Tensor]:
    """The values that rank `root` has of the parameters of which this one has `mine`."""
    if not 0 <= root < world.size:
        raise ValueError(
            f"modifier_rank must be one of the {world.size} ranks, 0 to {world.size - 1}, not "
            f"{root}"
        )
    if world.everyone is None:
        return list(mine)
    shared = [values.contiguous() for values in mine]
    for values, name in zip(shared, names, strict=True):
        world.everyone.broadcast(values, root, f"changing {name}")
    return shared


@uninterrupted
def masters(params: Parameters) -> list[torch.Tensor]:
    """Copies the fp32 master weights of parameters.

    Any rank may call it alone.

    Args:
        params: one managed parameter or several, of one model.

    Returns:
        one fp32 tensor per parameter, whole, in its shape, in RAM that no budget counts; of a
        frozen parameter its value.

    Raises:
        UnmanagedParameterError: a parameter belongs to no engine.
    """
    listed = _listed(params)
    found = export_masters(engine_of(listed), listed)
    return [found[p] if p in found else p.detach().float() for p in listed]


@uninterrupted
def grads(params: Parameters) -> list[torch.Tensor | None]:
    """Copies gradients as the next step will use them: averaged, unscaled, and clipped so far.

    With several ranks all must call it. To change a gradient, assign `.grad`: the tensor is taken
    in when clipping or the step needs it.

    Args:
        params: one managed parameter or several, of one model.

    Returns:
        one fp32 tensor per parameter, whole, in its shape, on its device, in memory that no budget
        counts; None for a parameter without a gradient.

    Raises:
        UnmanagedParameterError: a parameter belongs to no engine.
    """
    listed = _listed(params)
    if not listed:
        return []
    engine = engine_of(listed)
    members = list(dict.fromkeys(engine.with_grads(listed)))
    wholes = engine.steps.grad_factors.read(members)
    found = {id(m.param): whole for m, whole in zip(members, wholes, strict=True)}
    return [found.get(id(p)) for p in listed]


@uninterrupted
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clips the norm of all gradients together, as torch.nn.utils.clip_grad_norm_ does.

    torch's own works too, unless ranks use different parameters in a step: it takes each `.grad`
    before it meets the other ranks. This one sums in double, per parameter in a fixed order, so the
    norm does not depend on the placement. The kept gradients are not touched: the step multiplies
    by a factor, in fp32. Factors of several calls are multiplied. Call it after the last backward
    of a step, because gradients that are added later are not clipped. All ranks must call it.

    Args:
        parameters: one managed parameter or several, of one model.
        max_norm: upper limit of the norm.
        norm_type: 2 or inf.
        error_if_nonfinite: raise for a norm that is infinite or NaN. Default: False; step() then
            refuses a NaN norm.

    Returns:
        the norm before clipping, a scalar in fp32.

    Raises:
        ValueError: max_norm is not positive, or it is another norm.
        NonFiniteError: the norm is not finite, with error_if_nonfinite; nothing is changed.
        UnmanagedParameterError: a parameter belongs to no engine.
    """
    if norm_type not in (2, math.inf):
        raise ValueError(f"norm_type must be 2 or inf, not {norm_type}")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    listed = _listed(parameters)
    engine = engine_of(listed)
    norm = engine.steps.grad_factors.clip_norm(
        engine.with_grads(listed), max_norm, norm_type, error_if_nonfinite
    )
    return torch.tensor(norm, dtype=torch.float32, device="cpu")


@uninterrupted
def clip_grad_value_(parameters: Parameters, clip_value: float) -> None:
    """Limits each element of gradients, as torch.nn.utils.clip_grad_value_ does.

    The kept gradients are clamped in the grad dtype, so those with homes on NVMe are read and
    written. Under fp16 with hetero's loss scale a gradient that overflowed stays as it is, because
    its step is going to be skipped. All ranks must call it.

    Args:
        parameters: one managed parameter or several, of one model.
        clip_value: elements are limited to [-clip_value, clip_value], unscaled.

    Raises:
        ValueError: clip_value is negative or NaN.
        UnmanagedParameterError: a parameter belongs to no engine.
    """
    if not clip_value >= 0:
        raise ValueError(f"clip_value must be 0 or more, not {clip_value}")
    listed = _listed(parameters)
    engine = engine_of(listed)
    engine.steps.grad_factors.clamp(engine.with_grads(listed), -clip_value, clip_value)


def no_sync(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Inside the block gradients are only added up on each rank, as with DDP's no_sync().

    They are averaged together with those of the first backward outside. Until then they are kept
    whole, in stages 2 and 3 beside the shards, within host_memory. With one rank it tells updates
    during backward (overlap_updates) that more gradients of this step will come, and changes
    nothing else.

    Args:
        model: a model that went through hetero.initialize().

    Raises:
        UnmanagedParameterError: the model has no managed parameters.
        BudgetError: in backward, if there is no room for whole gradients.
    """
    return Uninterrupted(engine_of(model.parameters()).steps.grad_intake.no_sync())


def offload_activations(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Inside the block all that autograd saves in this thread counts as the model's activations.

    Without it that is so while the model's forward runs: what is computed of its output, a loss
    say, is saved by autograd as always.

        with hetero.offload_activations(model):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.backward(loss)

    Args:
        model: went through hetero.initialize(), with the option activation_memory.

    Raises:
        UnmanagedParameterError: no engine has the model's parameters.
        ValueError: the model was initialized without activation_memory.
    """
    return Uninterrupted(_offloading(model))


@contextmanager
def _offloading(model: torch.nn.Module) -> Iterator[None]:
    engine = engine_of(model.parameters())
    engine.check_usable()
    if engine.watch.activations is None:
        raise ValueError(
            "offload_activations() needs memory that is left to activations: give "
            "activation_memory, a number of bytes or 'auto', to ZeroInitContext or initialize()"
        )
    hooks = engine.torch_function_uses.saved_tensors.hooks()
    if hooks is None:  # inside another such block, or the model's forward
        yield
        return
    with saved_tensors_hooks(*hooks):
        yield
