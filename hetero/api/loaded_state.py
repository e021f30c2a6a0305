"""What optimizer.load_state_dict() is given: what is refused, and what torch's optimizers gave.

torch.optim.AdamW, Adam, Adagrad, SGD and Muon keep the same states in as many bits, but no master,
and their param groups have other options. SGD and Muon keep no step, and a momentum_buffer only
from the first update (with momentum) on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hetero.chunk_groups.update_tasks import number
from hetero.state.managed_param import ManagedParam

LARGEST = torch.finfo(torch.float32).max  # of what an update computes with
# Of HybridMuon's states alone: torch.optim.Muon keeps it, and the master, when it trains on.
MOMENTUM_SUM = "momentum_sum"
_LAST_STEP = 2**53  # up to which a float counts

# Options of torch's optimizers that change what is computed, in a way that no rule here has.
_OTHER_RULES = ("amsgrad", "maximize")
# Those that say how torch computes.
_HOW_TORCH_COMPUTES = ("foreach", "fused", "capturable")
# Those that a new training cannot begin with, and that say nothing of one that goes on.
_AT_FIRST = ("differentiable", "initial_accumulator_value")
_NOT_IN_TORCH = ("bias_correction", "adamw_mode")  # options that torch's param groups lack
_NEVER_NEGATIVE = ("exp_avg_sq", "sum")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_torch_options(options: Mapping[str, Any], where: str = "") -> None:
    """Raises ValueError for options of torch's optimizers by which the update is another one.

    Args:
        options: of a new param group, or of a constructor.
        where: whose they are, before the option's name.
    """
    for name in (*_OTHER_RULES, *_AT_FIRST):
        if options.get(name):
            raise ValueError(
                f"{where}{name}={options[name]!r} is another update, which no optimizer of hetero "
                f"has; leave it out"
            )


def check_torch_arguments(class_name: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError as check_torch_options(), and TypeError for what torch's do not take."""
    for name in given:
        if name not in (*_OTHER_RULES, *_HOW_TORCH_COMPUTES, *_AT_FIRST):
            raise TypeError(f"{class_name}() got an unexpected keyword argument {name!r}")
    check_torch_options(given, f"{class_name}: ")


def refuse_other_rules(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for param groups of torch's optimizers that update by another rule."""
    for index, group in enumerate(groups):
        options = {name: group.get(name) for name in _OTHER_RULES}
        check_torch_options(options, f"in param group {index} of the state ")


def in_own_options(group: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A param group of a state with the options of an optimizer's `own` param group.

    What torch's optimizers do not say stays as `own` has it; what they alone have is left out.
    """
    ours = {name: own[name] for name in _NOT_IN_TORCH if name in own}
    if "adamw_mode" in own and "decoupled_weight_decay" in group:  # torch's name of the same
        ours["adamw_mode"] = bool(group["decoupled_weight_decay"])
    dropped = (*_OTHER_RULES, *_HOW_TORCH_COMPUTES, *_AT_FIRST, "decoupled_weight_decay")
    return ours | {name: value for name, value in group.items() if name not in dropped}


def group_options(
    group: Mapping[str, Any],
    own: Mapping[str, Any],
    wanted: Sequence[str],
    name: str,
    optimizer_name: str,
) -> dict[str, Any]:
    """in_own_options() of a param group, called `name`, of an optimizer that has these options.

    Raises ValueError if it lacks some that are `wanted`, because another rule's optimizer had it.
    """
    options = in_own_options(group, own)
    if missing := [each for each in wanted if each not in options]:
        raise ValueError(f"{name} is not {optimizer_name}'s: it lacks {', '.join(missing)}")
    return options


def is_from_torch(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of torch's optimizers gave the state with these param groups.

    Such a state may have been given to it by an optimizer of hetero before. It keeps what it does
    not know, so its masters, if there are any, are older than its parameters.
    """
    return any(name in group for group in groups for name in ("foreach", "maximize"))


def momentum_sum(momentum: torch.Tensor) -> int:
    """The sum of the bits of a momentum in fp32, as int32, which no order of additions changes.

    It tells whether a momentum is still the one that was saved with a master (HybridMuon).
    """
    return int(momentum.float().contiguous().view(torch.int32).sum(dtype=torch.int64))


def in_own_state(state: Any, param: torch.Tensor, names: Sequence[str], from_torch: bool) -> Any:
    """A parameter's state, with the step and the buffer that torch's SGD may leave out.

    Of torch's own optimizers masters are left out (is_from_torch(), or a momentum that has changed
    since it was saved). What is no state at all is returned as it is.
    """
    if not isinstance(state, Mapping):
        return state
    own = dict(state)
    if from_torch:
        own.pop("master", None)
    if MOMENTUM_SUM in own:
        momentum, saved = own.get("momentum_buffer"), own.pop(MOMENTUM_SUM)
        if not (isinstance(momentum, torch.Tensor) and momentum_sum(momentum) == saved):
            own.pop("master", None)
    if "momentum_buffer" in names:
        own.setdefault("step", 0)
        if own.get("momentum_buffer") is None:
            own["momentum_buffer"] = torch.zeros((), device="cpu").expand(param.shape)
        elif number(own["step"]) == 0:
            own["step"] = 1  # a buffer is kept from the first update on
    return own


def check_state(
    managed: ManagedParam, state: object, names: Sequence[str], optimizer_name: str
) -> None:
    """Raises ValueError if `state` is not a state of this parameter that updates can go on from.

    Args:
        managed: the parameter.
        state: "step", the states of the rule, and perhaps "master".
        names: the states of the rule.
        optimizer_name: whose rule it is.
    """
    of = f"the state of {managed.name}"
    if not managed.chunk.trainable:
        raise ValueError(
            f"the state has {managed.name}, which was frozen at hetero.initialize(); set "
            f"requires_grad before it, or leave the parameter out of the state"
        )
    if not isinstance(state, Mapping):
        raise ValueError(f"{of} is {state!r}, must be a dict with {', '.join(('step', *names))}")
    for key in sorted({"step", *names} - set(state)):
        raise ValueError(f"{of} has no {key!r}")
    for key in sorted(set(state) - {"step", *names, "master"}, key=str):
        raise ValueError(f"{of} has {key!r}, which {optimizer_name} does not have")
    step = number(state["step"])
    if step is None or not (0 <= step <= _LAST_STEP and step.is_integer()):
        raise ValueError(
            f"{of} has step {state['step']!r}, must be a whole number, 0 or more and at most 2**53"
        )
    for key in sorted(set(state) - {"step"}):
        _check_values(f"{of} has {key}", state[key], managed, key in _NEVER_NEGATIVE)


def _check_values(has: str, value: object, managed: ManagedParam, never_negative: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{has} {value!r}, must be a tensor")
    if value.dtype not in _DTYPES:
        raise ValueError(f"{has} of {value.dtype}, must be of fp32, bf16, fp16 or fp64")
    if value.shape != managed.param.shape:
        raise ValueError(
            f"{has} of shape {tuple(value.shape)}, and the parameter has "
            f"{tuple(managed.param.shape)}"
        )
    low, high = (float(extreme) for extreme in value.detach().aminmax())
    if not (math.isfinite(low) and low >= -LARGEST and high <= LARGEST):
        bad = high if abs(high) > LARGEST else low
        raise ValueError(f"{has} with the value {bad}, must be finite and in the range of fp32")
    if never_negative and low < 0:
        raise ValueError(f"{has} with the value {low}, must be 0 or more")
