"""What is checked, and agreed by all ranks, before an optimizer step changes anything."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import torch

from hetero.overlap import OverlapUpdates
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.managed_param import ManagedParam
from offload.errors import HeteroError, NonFiniteError


def check_left_out(managed: Iterable[ManagedParam], given: Container[ManagedParam]) -> None:
    """Raises HeteroError for a gradient of what was frozen and is in no param group."""
    for m in managed:
        frozen = m.was_frozen and not m.chunk.trainable
        if frozen and m.param.grad is not None and m not in given:
            raise HeteroError(
                f"{m.name} was frozen at hetero.initialize() and has a gradient now, but no "
                f"param group has it; add it with optimizer.add_param_group()"
            )


def check_updatable(managed: ManagedParam, overlap: OverlapUpdates) -> None:
    """Raises HeteroError if an update of the parameter, or a change of it, would be lost."""
    # (If step() does not wait, a parameter in use would lose its value there.)
    free = managed.uses == 0 or not overlap.in_forward
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


def meet_with_same(
    members: Sequence[ManagedParam], managed: Iterable[ManagedParam], world: ProcessGroups
) -> None:
    """Until all ranks are about to update, and of all that are `managed` the same `members`."""
    everyone = world.everyone
    if everyone is None:
        return
    name_of = {m.slice.param.index: m.name for m in managed}
    flags = torch.zeros(max(name_of) + 1, dtype=torch.uint8)
    flags[[m.slice.param.index for m in members]] = 1
    for peer, theirs in enumerate(everyone.all_gather(flags, "optimizer.step()")):
        if not torch.equal(theirs, flags):
            index = int((theirs != flags).nonzero()[0])
            raise HeteroError(
                f"{name_of[index]} has a gradient on one of {world.name} and "
                f"{everyone.name(peer)} only at optimizer.step(); clear gradients, and give "
                f"the optimizer parameters, on all ranks alike"
            )


def check_factors(members: Iterable[ManagedParam]) -> None:
    """Raises NonFiniteError for a gradient that would be multiplied by what is not finite."""
    for m in members:
        if not math.isfinite(m.grad_factor):
            raise NonFiniteError(
                f"the gradient of {m.name} is multiplied by {m.grad_factor}, because it was "
                f"clipped or unscaled by a number that is not finite; look at the norm that "
                f"clipping returned, and call optimizer.zero_grad() to go on without this step"
            )
