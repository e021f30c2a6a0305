"""One optimizer step: what is checked before anything is changed, and then the update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hetero.chunk_groups.update_tasks import Groups, HyperOf
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.gradients.grad_factors import GradFactors
from hetero.runtime.gradients.gradients import Gradients
from hetero.runtime.modules.all_params import AllParams
from hetero.runtime.update_schedule import UpdateSchedule
from hetero.state.loss_scale import LossScale
from hetero.state.managed_param import ManagedParam
from offload.errors import HeteroError, NonFiniteError


class OptimizerStep:
    """Makes steps: of all ranks together, or of none."""

    def __init__(
        self,
        managed: Mapping[int, ManagedParam],
        params: AllParams,
        gradients: Gradients,
        grad_factors: GradFactors,
        schedule: UpdateSchedule,
        loss_scale: LossScale,
        world: ProcessGroups,
    ) -> None:
        """`managed` are all parameters, by id(); more may come."""
        self._managed = managed
        self._params = params
        self._gradients = gradients
        self._grad_factors = grad_factors
        self._schedule = schedule
        self._loss_scale = loss_scale
        self._world = world

    def make(self, listed: Groups, hyper_of: HyperOf) -> None:
        """Updates the parameters of `listed`, the optimizer's param groups, that have gradients.

        Gradients are means over the ranks. Raises, before anything is changed, HeteroError for what
        would be lost silently, or if ranks differ; NonFiniteError for factors that are not finite,
        and if fp16 gradients overflow at the smallest loss scale.
        """
        for _, all_members in listed:
            for m in all_members:
                self._check_trainable(m)
        groups = [(options, self._gradients.of(some)) for options, some in listed]
        members = [m for _, some in groups for m in some]
        overflow = self._loss_scale.dynamic and self._grad_factors.any_non_finite(members)
        self._meet(members)
        if overflow and self._loss_scale.value <= 1:
            raise NonFiniteError(
                "fp16 gradients overflow although the loss scale is down to 1; use dtype='bf16' or "
                "'fp32', whose range is wider"
            )
        if (members or self._schedule.is_half_made) and not overflow:
            _check_factors(members)
            self._schedule.step(groups, hyper_of)
        if members:
            self._loss_scale.update(overflow)

    def _meet(self, members: Sequence[ManagedParam]) -> None:
        """Until all ranks are about to update, and the same `members`."""
        everyone = self._world.everyone
        if everyone is None:
            return
        name_of = {m.slice.param.index: m.name for m in self._managed.values()}
        flags = torch.zeros(max(name_of) + 1, dtype=torch.uint8)
        flags[[m.slice.param.index for m in members]] = 1
        self._params.settle()
        for peer, theirs in enumerate(self._world.all_gather(flags, "optimizer.step()")):
            if not torch.equal(theirs, flags):
                index = int((theirs != flags).nonzero()[0])
                raise HeteroError(
                    f"{name_of[index]} has a gradient on one of {self._world.name} and "
                    f"{everyone.name(peer)} only at optimizer.step(); clear gradients, and give "
                    f"the optimizer parameters, on all ranks alike"
                )

    def _check_trainable(self, managed: ManagedParam) -> None:
        # (If step() does not wait, a parameter in use would lose its value there.)
        free = managed.uses == 0 or not self._schedule.overlap.in_forward
        if not (free and managed.is_in_place):
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


def _check_factors(members: Sequence[ManagedParam]) -> None:
    for m in members:
        if not math.isfinite(m.grad_factor):
            raise NonFiniteError(
                f"the gradient of {m.name} is multiplied by {m.grad_factor}, because it was "
                f"clipped or unscaled by a number that is not finite; look at the norm that "
                f"clipping returned, and call optimizer.zero_grad() to go on without this step"
            )
