"""A step of an optimizer: what is checked, and agreed by all ranks, before it changes anything.

Each rank updates its own shards, so ranks that differ would train the shards differently. When all
have come and are the same, no rank reads values that are about to change. (An update that began
during backward is a guess of its rank alone: no other one reads its values before this.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hetero.chunk_groups.chunk_group import Shared
from hetero.chunk_groups.update_tasks import Groups, LrScaleOf, numbers_of
from hetero.ranks.communicator import Communicator
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.gradients import GradFactors, GradIntake
from hetero.runtime.modules.param_registry import AddsParams, ParamRegistry
from hetero.runtime.step_watch import StepTracer
from hetero.runtime.update_schedule import OptimizerView, UpdateSchedule
from hetero.state.managed_param import ManagedParam, ParamState
from offload.errors import HeteroError, NonFiniteError


class OptimizerSteps:
    """Makes the steps of an engine's optimizers: takes in gradients, and has parameters updated.

    Attributes:
        optimizers: as initialize() was given them.
        schedule: when chunks are updated.
        grad_intake, grad_factors: what comes from backward, and what is done to it.
    """

    def __init__(
        self,
        params: ParamRegistry,
        shared: Shared,
        shard: Communicator | None,
        optimizers: Sequence[OptimizerView],
        tracer: Callable[[], StepTracer],
    ) -> None:
        """No step was made. `shard`: the ranks that share gradients. `tracer` gives what follows
        backwards, which exists by the first one."""
        self._params, self._loss_scale = params, shared.loss_scale
        self.optimizers = optimizers
        self.schedule = UpdateSchedule(params, shared.config, shared.loss_scale, optimizers)
        self.grad_intake = GradIntake(
            params, shared.loss_scale, self.schedule, lambda: tracer().gradient()
        )
        self.grad_factors = GradFactors(
            params, self.grad_intake, shared, shard, lambda: tracer().forget()
        )
        self._added_params: AddsParams | None = None

    def attach(self, added_params: AddsParams) -> None:
        """Gets what gives parameters a place later; called once."""
        self._added_params = added_params

    @property
    def added_params(self) -> AddsParams:
        """What gives parameters a place after initialize()."""
        assert self._added_params is not None
        return self._added_params

    def optimizer_of(self, param: torch.Tensor) -> OptimizerView | None:
        """The optimizer that has the parameter; None if none has."""
        for optimizer in self.optimizers:
            if any(p is param for group in optimizer.param_groups() for p in group["params"]):
                return optimizer
        return None

    def begin(self) -> None:
        """All updates are made, all parameters have a place, and all gradients are means."""
        self.schedule.wait_all()
        self.added_params.take_in_unfrozen()
        self.grad_intake.average(force=True)

    def make(
        self,
        listed: Sequence[tuple[dict[str, Any], list[ManagedParam]]],
        optimizer: OptimizerView,
    ) -> None:
        """Makes one update, as Engine.step() says, of the parameters in `listed`, the optimizer's
        param groups, that have gradients; begin() was called."""
        managed = self._params.managed.values()
        given = dict.fromkeys(m for _, members in listed for m in members)
        _check_left_out(managed, self.optimizer_of)
        self._params.take_in_written(given)
        for m in given:
            _check_updatable(m)
        groups = [(options, self.grad_intake.of(members)) for options, members in listed]
        members = [m for _, some in groups for m in some]
        overflow = self._loss_scale.dynamic and self.grad_factors.any_non_finite(members)
        self._params.finish_transfers("optimizer.step()", ends_step=True)
        world = self._params.chunk_groups[0].world
        _meet_with_same(groups, managed, optimizer.options, optimizer.lr_scale_of, world)
        if overflow and self._loss_scale.value <= 1:
            raise NonFiniteError(
                "fp16 gradients overflow although the loss scale is down to 1; use dtype='bf16' or "
                "'fp32', whose range is wider"
            )
        if members and not overflow:
            _check_factors(members)
            self.schedule.step(groups, optimizer)
        else:
            self.schedule.revoke_all()
        if members:
            self._loss_scale.update(overflow)
        self.schedule.end_step()

    def pause(self) -> None:
        """Until no update is under way, so that homes can move."""
        self.schedule.revoke_all()
        self.schedule.wait_all()
        self.schedule.wait_copied()
        for chunk_group in self._params.chunk_groups:
            chunk_group.updates.versions.free_all()
        self._params.take_in_written(self._params.managed.values())

    def meet(self, what: str) -> None:
        """Waits for all ranks, so that none of them still reads values that are about to change.

        Raises PeerError if a rank does not come; `what` says what they are about to do.
        """
        self.schedule.wait_all()
        self._params.finish_transfers(what)
        self._params.chunk_groups[0].world.meet(what)


def _check_left_out(
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


def _check_updatable(managed: ManagedParam) -> None:
    """Raises HeteroError if an update of the parameter, or a change of it, would be lost."""
    is_at_home = managed.is_at_home or managed.state is ParamState.UPDATING
    if not is_at_home or managed.is_moved:
        raise HeteroError(
            f"{managed.name} was moved or converted after hetero.initialize() (model.to(), "
            f".half(), an assignment to .data), or step() runs inside hetero.gathered(); its "
            f"update would be lost"
        )
    if managed.writes.are_unnoticed:
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


def _meet_with_same(
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


def _check_factors(members: Iterable[ManagedParam]) -> None:
    """Raises NonFiniteError for a gradient that would be multiplied by what is not finite."""
    for m in members:
        if not math.isfinite(m.grad_factor):
            raise NonFiniteError(
                f"the gradient of {m.name} is multiplied by {m.grad_factor}, because it was "
                f"clipped or unscaled by a number that is not finite; look at the norm that "
                f"clipping returned, and call optimizer.zero_grad() to continue without this step"
            )
