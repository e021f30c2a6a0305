"""What is checked, and agreed by all ranks, before an optimizer step changes anything.

Each rank updates its own shards, so ranks that differ would train the shards differently. When all
have come and are the same, no rank reads values that are about to change. (An update that began
during backward is a guess of its rank alone: no other one reads its values before this.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from hetero.chunk_groups.update_tasks import Groups, LrScaleOf
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.options import numbers_of
from hetero.state.managed_param import ManagedParam
from offload.errors import HeteroError, NonFiniteError


def check_left_out(
    managed: Iterable[ManagedParam], optimized: Callable[[torch.Tensor], object]
) -> None:
    """Raises HeteroError for a gradient of what was frozen and is in no param group.

    `optimized` says which optimizer has a parameter, or None.
    """
    for m in managed:
        frozen = m.was_frozen and not m.chunk.trainable
        if frozen and m.param.grad is not None and optimized(m.param) is None:
            raise HeteroError(
                f"{m.name} was frozen at hetero.initialize() and has a gradient now, but no "
                f"param group has it; add it with optimizer.add_param_group()"
            )


def check_updatable(managed: ManagedParam) -> None:
    """Raises HeteroError if an update of the parameter, or a change of it, would be lost."""
    if not managed.is_in_place:
        raise HeteroError(
            f"{managed.name} was moved or converted after hetero.initialize() (model.to(), "
            f".half(), an assignment to .data), or step() runs inside hetero.gathered(); its "
            f"update would be lost"
        )
    if managed.changed_unnoticed:
        raise HeteroError(
            f"{managed.name} was changed in place outside hetero.gathered(..., "
            f"modifier_rank=0); its master would not follow"
        )
    if not managed.chunk.trainable and managed.param.grad is not None:
        raise HeteroError(
            f"{managed.name} was frozen at hetero.initialize() and has a gradient now, but no "
            f"optimizer state; set requires_grad before initialize(), or before a forward "
            f"outside hetero.gathered()"
        )


def meet_with_same(
    groups: Groups,
    managed: Iterable[ManagedParam],
    options: Sequence[str],
    lr_scale_of: LrScaleOf,
    world: ProcessGroups,
) -> None:
    """Until all ranks are about to make the same update, each of its own shards.

    That is one of the same parameters in the same param groups, with gradients that are multiplied
    by the same factors, and the same `options` and factors of the learning rate, bit for bit.
    Raises HeteroError on all ranks for the first difference, with nothing changed.
    """
    everyone = world.everyone
    if everyone is None:
        return
    name_of = {m.slice.param.index: m.name for m in managed}
    params = max(name_of) + 1
    mine = _facts(groups, params, options, lr_scale_of)
    if everyone.are_same(mine.view(torch.int64), "optimizer.step()"):
        return
    facts = everyone.all_gather(mine, "optimizer.step()")
    for peer, theirs in enumerate(facts):
        places = (theirs.view(torch.int64) != facts[0].view(torch.int64)).nonzero()
        if len(places):
            place, ranks = int(places[0]), (everyone.name(0), everyone.name(peer))
            values = float(facts[0][place]), float(theirs[place])
            differences = (_uses_differ, _factors_differ, _lr_scales_differ)
            if place >= len(differences) * params:
                label = _labels(groups, options)[place - len(differences) * params]
                raise HeteroError(_options_differ(label, values, ranks))
            difference = differences[place // params]
            raise HeteroError(difference(name_of[place % params], values, ranks))


def _options_differ(label: str, values: tuple[float, float], ranks: tuple[str, str]) -> str:
    return (
        f"{label} is {values[0]} on {ranks[0]} and {values[1]} on {ranks[1]} at optimizer.step(), "
        f"and each rank updates a shard of every parameter; set options, and step schedulers with "
        f"a metric that is averaged over the ranks, on all ranks alike"
    )


def _factors_differ(name: str, values: tuple[float, float], ranks: tuple[str, str]) -> str:
    return (
        f"the gradient of {name} is multiplied by {values[0]} on {ranks[0]} and by {values[1]} on "
        f"{ranks[1]} at optimizer.step(); clip, scale and unscale gradients on all ranks alike"
    )


def _lr_scales_differ(name: str, values: tuple[float, float], ranks: tuple[str, str]) -> str:
    return (
        f"the learning rate of {name} is multiplied by {values[0]} on {ranks[0]} and by "
        f"{values[1]} on {ranks[1]} at optimizer.step(); set adjust_lr_fn on all ranks alike"
    )


def _uses_differ(name: str, values: tuple[float, float], ranks: tuple[str, str]) -> str:
    if not all(values):
        return (
            f"{name} has a gradient on one of {ranks[0]} and {ranks[1]} only at optimizer.step(); "
            f"clear gradients, and give the optimizer parameters, on all ranks alike"
        )
    return (
        f"{name} is in param group {int(values[0]) - 1} on {ranks[0]} and in "
        f"{int(values[1]) - 1} on {ranks[1]} at optimizer.step(); make param groups on all ranks "
        f"alike"
    )


def _facts(
    groups: Groups, params: int, options: Sequence[str], lr_scale_of: LrScaleOf
) -> torch.Tensor:
    """What ranks compare before an update, fp64.

    For each of so many `params` the number of the param group that updates it, from 1, or 0; for
    each the factor of its gradient; for each that of its learning rate; then the numbers that
    _labels() names.
    """
    numbers = [0.0] * (3 * params)
    for number, (group, members) in enumerate(groups, start=1):
        for m in members:
            index = m.slice.param.index
            numbers[index] = number
            numbers[params + index] = m.grad_factor
            numbers[2 * params + index] = lr_scale_of(group, m.param.shape)
    for group, _ in groups:
        for name in options:
            numbers += numbers_of(group.get(name))
    return torch.tensor(numbers, dtype=torch.float64)


def _labels(groups: Groups, options: Sequence[str]) -> list[str]:
    """What each number of the param groups' options is."""
    return [
        f"{name} of param group {index}"
        for index, (group, _) in enumerate(groups)
        for name in options
        for _ in numbers_of(group.get(name))
    ]


def check_factors(members: Iterable[ManagedParam]) -> None:
    """Raises NonFiniteError for a gradient that would be multiplied by what is not finite."""
    for m in members:
        if not math.isfinite(m.grad_factor):
            raise NonFiniteError(
                f"the gradient of {m.name} is multiplied by {m.grad_factor}, because it was "
                f"clipped or unscaled by a number that is not finite; look at the norm that "
                f"clipping returned, and call optimizer.zero_grad() to continue without this step"
            )
