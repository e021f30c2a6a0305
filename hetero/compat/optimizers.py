"""hetero's optimizers under other projects' names, and torch's own optimizers made hetero's.

This module has torch.optim's names; `optimizers_of()` makes a module with another project's. An
adapter is given the optimizer that the loop has made, and loops, schedulers and callbacks keep it:
they set a group's "lr", call step(), save its state_dict(). So it becomes one of hetero's itself
(its class changes), instead of being replaced by another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetero.api import optimizers as own
from hetero.api.loaded_state import check_torch_arguments
from hetero.api.optimizer import HybridOptimizer, ParamGroups, unmanaged
from hetero.compat.key_table import DeclaresArguments, log_not_needed, nearest, refuse_unknown
from hetero.compat.module_paths import mirrored

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Muon"]

Adam, AdamW = own.Adam, own.AdamW
SGD, Adagrad, Muon = own.HybridSGD, own.HybridAdagrad, own.HybridMuon

# Arguments of other projects: hetero's names of some, and others with the value that says nothing
# and why another one is not needed.
_OWN_NAMES = {"adam_w_mode": "adamw_mode", "do_bias_correction": "bias_correction"}
_NOT_NEEDED = {
    "set_grad_none": (True, "zero_grad(set_to_none=False) says it"),
    "contiguous_params": (False, "parameters always lie in chunks"),
    "torch_adam": (False, "hetero has one kernel"),
}
_BETAS = (0.9, 0.999)
_Table = Mapping[str, tuple[type[HybridOptimizer], Callable[..., None]]]
# fmt: off
# By module and name: hetero's optimizer, and the other project's arguments. The first ones are the
# parameters; further options of hetero's are taken where the last one takes all others.
_NAMES: Mapping[str, _Table] = {
    "deepspeed.ops.adam": {
        "DeepSpeedCPUAdam": (own.CPUAdam, lambda model_params, lr=1e-3, bias_correction=True,
            betas=_BETAS, eps=1e-8, weight_decay=0.0, amsgrad=False, adamw_mode=True,
            fp32_optimizer_states=True: None),
        "FusedAdam": (own.HybridAdam, lambda params, lr=1e-3, bias_correction=True, betas=_BETAS,
            eps=1e-8, adam_w_mode=True, weight_decay=0.0, amsgrad=False, set_grad_none=True: None),
        "DeepSpeedCPULion": (own.HybridLion, lambda model_params, lr=1e-3, betas=_BETAS,
            weight_decay=0.0, fp32_optimizer_states=True: None),
        "FusedLion": (own.HybridLion, lambda params, lr=1e-3, betas=_BETAS, weight_decay=0.0,
            set_grad_none=True: None),
        "DeepSpeedCPUAdagrad": (Adagrad, lambda model_params, lr=1e-2, eps=1e-10, weight_decay=0.0,
            amsgrad=False, fp32_optimizer_states=True: None),
    },
    "colossalai.nn.optimizer": {
        kind.__name__: (kind, lambda model_params, lr=1e-3, bias_correction=True, betas=_BETAS,
            eps=1e-8, weight_decay=0.0, adamw_mode=True, nvme_offload_fraction=0.0,
            nvme_offload_dir=None, **defaults: None)
        for kind in (own.HybridAdam, own.CPUAdam)
    },
    "oneflow.optim": {
        "SGD": (SGD, lambda params, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0,
            nesterov=False, **options: None),
        "Adagrad": (Adagrad, lambda params, lr=1e-2, lr_decay=0.0, weight_decay=0.0,
            initial_accumulator_value=0.0, eps=1e-10, **options: None),
        **{kind.__name__: (kind, lambda params, lr=1e-3, betas=_BETAS, eps=1e-8, weight_decay=0.0,
            amsgrad=False, do_bias_correction=True, **options: None) for kind in (Adam, AdamW)},
    },
}
# fmt: on
# Of a DeepSpeed configuration, by the type in lower case: the class, and the params that it takes.
_ADAM = "lr betas eps weight_decay bias_correction adam_w_mode torch_adam fp32_optimizer_states"
_TYPES: Mapping[str, tuple[Any, str]] = {
    "adam": (own.HybridAdam, _ADAM),
    "adamw": (own.HybridAdam, _ADAM),
    "lion": (own.HybridLion, "lr betas weight_decay fp32_optimizer_states"),
    "adagrad": (Adagrad, "lr lr_decay eps weight_decay fp32_optimizer_states"),
    "sgd": (SGD, "lr momentum dampening weight_decay nesterov"),
}
_OF_TORCH = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")


class RenamedOptimizer(DeclaresArguments, HybridOptimizer):
    """An optimizer of hetero's that takes the arguments of another project's.

    Attributes:
        nvme_offload_fraction, nvme_offload_dir: ColossalAI's: above 0 the directory on NVMe is
            used, at 1 for all optimizer state.

    Raises ValueError for a fraction without a directory, or beyond 0 to 1.
    """

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
        super().__init__(params, **_own_options(type(self).__name__, given))


def optimizers_of(path: str) -> Any:
    """Makes the module `path`, below hetero.compat, of another project's optimizers."""
    made = mirrored(f"{__package__}.{path}", {})
    for name, (kind, arguments) in _NAMES[path].items():
        doc = f"hetero's {kind.__name__} with other arguments."
        members = {"__module__": made.__name__, "__doc__": doc}
        setattr(made, name, type(name, (RenamedOptimizer, kind), members, arguments=arguments))
    return made


def _own_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """hetero's options for another project's arguments; logs once those that are not needed."""
    options = {_OWN_NAMES.get(argument, argument): value for argument, value in given.items()}
    if not options.pop("fp32_optimizer_states", True):
        options["state_dtype"] = "bf16"
    for argument, (usual, reason) in _NOT_NEEDED.items():
        if options.pop(argument, usual) != usual:
            log_not_needed(f"{name}: {argument}", reason)
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
    rest = {name: value for name, value in given.items() if name not in _OF_TORCH}
    check_torch_arguments(type_, {name: given.get(name) for name in _OF_TORCH})
    options = _own_options(type_, rest)
    if made is own.HybridAdam:
        options["adamw_mode"] = kind == "adamw" or bool(options.get("adamw_mode", True))
        if given.get("torch_adam") and options["adamw_mode"]:  # as torch.optim.AdamW has it
            options.setdefault("weight_decay", 1e-2)
    if made is own.HybridLion:  # DeepSpeed's defaults
        options = {"lr": 1e-3, "betas": _BETAS, **options}
    options.setdefault("state_dtype", state_dtype)
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
