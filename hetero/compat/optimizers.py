"""hetero's optimizers under other projects' names, and torch's own optimizers made hetero's.

This module has torch.optim's names; `optimizers_of()` makes a module with another project's. An
adapter is given the optimizer that the loop has made, and loops, schedulers and callbacks keep it:
they set a group's "lr", call step(), save its state_dict(). So it becomes one of hetero's itself
(its class changes), instead of being replaced by another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch

from hetero.api import optimizers as own
from hetero.api.loaded_state import check_torch_arguments
from hetero.api.optimizer import HybridOptimizer, ParamGroups, unmanaged
from hetero.compat.key_table import (
    REQUIRED,
    DeclaresArguments,
    log_not_needed,
    nearest,
    refuse_unknown,
)
from hetero.compat.module_paths import mirrored

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Muon"]

Adam, AdamW = own.Adam, own.AdamW
SGD, Adagrad, Muon = own.HybridSGD, own.HybridAdagrad, own.HybridMuon

_OF_TORCH = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")


class _Argument(NamedTuple):
    """An argument that hetero does not have: the option that it sets, or why it is not needed."""

    default: Any
    option: str = ""
    values: Mapping[bool, str] | None = None  # of the option, by the argument's
    reason: str = ""


_ARGUMENTS = {
    "adam_w_mode": _Argument(True, "adamw_mode"),
    "do_bias_correction": _Argument(True, "bias_correction"),
    "fp32_optimizer_states": _Argument(True, "state_dtype", {True: "fp32", False: "bf16"}),
    "set_grad_none": _Argument(True, reason="zero_grad(set_to_none=False) says it"),
    "contiguous_params": _Argument(False, reason="parameters always lie in chunks"),
    "torch_adam": _Argument(False, reason="hetero has one kernel"),
    # RenamedOptimizer takes these itself.
    "nvme_offload_fraction": _Argument(0.0),
    "nvme_offload_dir": _Argument(None),
}
_LION = {"lr": 1e-3, "betas": (0.9, 0.999)}  # DeepSpeed's defaults
_COLOSSALAI_ADAM = (
    "model_params lr bias_correction betas eps weight_decay adamw_mode nvme_offload_fraction "
    "nvme_offload_dir **defaults"
)
_ONEFLOW_ADAM = "params lr betas eps weight_decay amsgrad do_bias_correction **options"

# By module and name: hetero's optimizer, the names of its arguments in their order (first the
# parameters; a last `**name` takes further options of hetero's), and defaults that are not its own.
_NAMES: Mapping[str, Mapping[str, tuple[type[HybridOptimizer], str, Mapping[str, Any]]]] = {
    "deepspeed.ops.adam": {
        "DeepSpeedCPUAdam": (
            own.CPUAdam,
            "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode "
            "fp32_optimizer_states",
            {},
        ),
        "FusedAdam": (
            own.HybridAdam,
            "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
            {},
        ),
        "DeepSpeedCPULion": (
            own.HybridLion,
            "model_params lr betas weight_decay fp32_optimizer_states",
            _LION,
        ),
        "FusedLion": (own.HybridLion, "params lr betas weight_decay set_grad_none", _LION),
        "DeepSpeedCPUAdagrad": (
            own.HybridAdagrad,
            "model_params lr eps weight_decay amsgrad fp32_optimizer_states",
            {},
        ),
    },
    "colossalai.nn.optimizer": {
        "HybridAdam": (own.HybridAdam, _COLOSSALAI_ADAM, {}),
        "CPUAdam": (own.CPUAdam, _COLOSSALAI_ADAM, {}),
    },
    "oneflow.optim": {
        "SGD": (SGD, "params lr momentum dampening weight_decay nesterov **options", {}),
        "Adagrad": (Adagrad, "", {}),
        "Adam": (Adam, _ONEFLOW_ADAM, {}),
        "AdamW": (Adam, _ONEFLOW_ADAM, {"decoupled_weight_decay": True}),
    },
}
# Of a DeepSpeed configuration, by the type in lower case: the class, and the params that it takes.
_ADAM = "lr betas eps weight_decay bias_correction adam_w_mode torch_adam fp32_optimizer_states"
_TYPES: Mapping[str, tuple[Any, str]] = {
    "adam": (own.HybridAdam, _ADAM),
    "adamw": (own.HybridAdam, _ADAM),
    "lion": (own.HybridLion, "lr betas weight_decay fp32_optimizer_states"),
    "adagrad": (Adagrad, "lr lr_decay eps weight_decay fp32_optimizer_states"),
    "sgd": (SGD, "lr momentum dampening weight_decay nesterov"),
}


class RenamedOptimizer(DeclaresArguments, HybridOptimizer):
    """An optimizer of hetero's that takes the arguments of another project's.

    Attributes:
        nvme_offload_fraction, nvme_offload_dir: ColossalAI's: above 0 the directory on NVMe is
            used, at 1 for all optimizer state.

    Raises ValueError for a fraction without a directory, or beyond 0 to 1.
    """

    _defaults: Mapping[str, Any]

    def __init_subclass__(cls, arguments: str = "", **defaults: Any) -> None:
        super().__init_subclass__()
        if not arguments:
            return
        known = {
            name: parameter.default
            for base in reversed(cls.__mro__)
            if "__init__" in vars(base) and not issubclass(base, RenamedOptimizer)
            for name, parameter in signature(base.__init__).parameters.items()
        }
        known |= {name: argument.default for name, argument in _ARGUMENTS.items()}
        known |= {"amsgrad": False, **defaults}
        first, *names = arguments.split()
        known[first] = REQUIRED
        cls._defaults = defaults
        cls._declare({name: known.get(name) for name in (first, *names)})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._given(args, kwargs)
        params = given.pop(next(iter(self._signature.parameters)))
        fraction = given.pop("nvme_offload_fraction", 0.0)
        folder = given.pop("nvme_offload_dir", None)
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"nvme_offload_fraction must be from 0 to 1, not {fraction!r}")
        if fraction and folder is None:
            raise ValueError("nvme_offload_fraction needs nvme_offload_dir, a directory on NVMe")
        self.nvme_offload_fraction, self.nvme_offload_dir = fraction, folder
        super().__init__(params, **_own_options(type(self).__name__, {**self._defaults, **given}))


def optimizers_of(path: str) -> Any:
    """Makes the module `path` of another project's optimizers: see _NAMES."""
    made = mirrored(path, {})
    for name, (kind, arguments, defaults) in _NAMES[path.removeprefix("hetero.compat.")].items():
        doc = f"hetero's {kind.__name__} with other arguments."
        members = {"__module__": path, "__doc__": doc}
        bases = RenamedOptimizer, kind
        found = type(name, bases, members, arguments=arguments, **defaults) if arguments else kind
        setattr(made, name, found)
    return made


def _own_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """hetero's options for another project's arguments; logs once those that are not needed."""
    options: dict[str, Any] = {}
    for argument, value in given.items():
        known = _ARGUMENTS.get(argument)
        if known is None:
            options[argument] = value
        elif known.option:
            options[known.option] = value if known.values is None else known.values[bool(value)]
        elif value != known.default:
            log_not_needed(f"{name}: {argument}", known.reason)
    return options


def named_optimizer(
    type_: str, given: Mapping[str, Any], params: ParamGroups, state_dtype: str
) -> HybridOptimizer:
    """The optimizer that a DeepSpeed configuration names with the params `given`, over `params`.

    DeepSpeed's "Adam" is AdamW unless adam_w_mode is false; "AdamW" is always.

    Raises ValueError for a type that hetero has not, and for unknown or wrong arguments.
    """
    kind = type_.lower()
    if kind not in _TYPES:
        names = ["Adam", "AdamW", "Lion", "Adagrad", "SGD"]
        raise ValueError(
            f"optimizer: hetero has no type {type_!r}; {nearest(type_, names)} (Muon with Adam: "
            f"hetero.initialize(model, [muon, adam]))"
        )
    made, known = _TYPES[kind]
    refuse_unknown(f"the params of the optimizer {type_}", given, [*known.split(), *_OF_TORCH])
    given = {**(_LION if kind == "lion" else {}), **given}
    check_torch_arguments(type_, {each: given.pop(each, None) for each in _OF_TORCH})
    options = _own_options(type_, given)
    if made is own.HybridAdam:
        options["adamw_mode"] = kind == "adamw" or bool(options.get("adamw_mode", True))
        if given.get("torch_adam") and options["adamw_mode"]:  # as torch.optim.AdamW has it
            options.setdefault("weight_decay", 1e-2)
    if options.get("state_dtype") != "bf16":
        options["state_dtype"] = state_dtype
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    optimizer: HybridOptimizer = made(params, **options)
    return optimizer


def hybrid_optimizer(optimizer: torch.optim.Optimizer) -> HybridOptimizer:
    """Makes an optimizer of torch's one of hetero's; the object and its param groups stay.

    Args:
        optimizer: torch.optim.Adam, AdamW, SGD, Adagrad or Muon, before its first step; or one of
            hetero's, which stays as it is.

    Returns:
        The same object.

    Raises:
        ValueError: it is another one, it was stepped already, its step() was replaced, or it has
            options that hetero's has not. It is as it was.
    """
    if isinstance(optimizer, HybridOptimizer):
        return optimizer
    name = type(optimizer).__name__
    # (torch.optim.Muon is newer than the oldest torch that hetero runs with.)
    if name not in __all__ or type(optimizer) is not getattr(torch.optim, name, None):
        raise ValueError(
            f"the optimizer must be one of hetero's, or torch.optim.AdamW, Adam, SGD, Adagrad or "
            f"Muon, not {name}: the update runs where the state lives"
        )
    # (Adagrad has its states, with steps of 0, from the beginning.)
    if any(
        float(state.get("step", 0)) or state.get("momentum_buffer") is not None
        for state in optimizer.state.values()
    ):
        raise ValueError(
            f"this {name} was stepped already; give it before its first step, and load its state "
            f"afterwards"
        )
    own_step = optimizer.__dict__.get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"step() of this {name} was replaced by {own_step!r}, which hetero's update would not "
            f"go through; register_step_pre_hook() and register_step_post_hook() work"
        )
    defaults = dict(optimizer.defaults)
    if name in ("Adam", "AdamW"):
        defaults["adamw_mode"] = defaults.pop("decoupled_weight_decay", name == "AdamW")
    kind: Any = globals()[name]
    made: HybridOptimizer = kind([dict(group) for group in optimizer.param_groups], **defaults)
    unmanaged.discard(made)
    _become(optimizer, made, tracked=own_step is not None)
    assert isinstance(optimizer, HybridOptimizer)
    return optimizer


def _become(optimizer: Any, made: HybridOptimizer, tracked: bool) -> None:
    """Makes `optimizer` what `made` is; its groups, defaults and hooks stay the same objects.

    `tracked`: a scheduler of learning rates has wrapped step(), to see whether it is called.
    """
    for kept, new in zip(
        (*optimizer.param_groups, optimizer.defaults),
        (*made.param_groups, made.defaults),
        strict=True,
    ):
        kept.clear()
        kept.update(new)
    attributes = vars(optimizer)
    for name in ("state", "step"):
        attributes.pop(name, None)
    attributes.update({n: value for n, value in vars(made).items() if n not in attributes})
    optimizer.__class__ = type(made)
    unmanaged.add(optimizer)
    if tracked:
        _track_steps(optimizer)


def _track_steps(optimizer: Any) -> None:
    """Wraps step() as torch's schedulers do, which warn if none has, or if it was not called."""
    this, update = weakref.ref(optimizer), type(optimizer).step

    def step(*args: Any, **kwargs: Any) -> Any:
        called: Any = this()
        called._opt_called = True
        return update(called, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
