"""The optimizer that a DeepSpeed configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.api.optimizer import HybridOptimizer, ParamGroups
from hetero.api.optimizers import HybridAdagrad, HybridAdam, HybridLion
from hetero.compat.deepspeed.options import Named
from hetero.compat.key_table import log_not_needed, nearest, refuse_unknown
from hetero.compat.torch_optimizers import SGD, pop_torch_options

_STATES = "fp32_optimizer_states"
_ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode", "torch_adam")
# By the name in lower case: the class, and the options that it takes.
_KINDS: Mapping[str, tuple[type[HybridOptimizer], tuple[str, ...]]] = {
    "adam": (HybridAdam, (*_ADAM, _STATES)),
    "adamw": (HybridAdam, (*_ADAM, _STATES)),
    "lion": (HybridLion, ("lr", "betas", "weight_decay", _STATES)),
    "adagrad": (HybridAdagrad, ("lr", "lr_decay", "eps", "weight_decay", _STATES)),
    "sgd": (SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
}
_OF_TORCH = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")


def make_optimizer(named: Named, params: ParamGroups, state_dtype: str) -> HybridOptimizer:
    """The optimizer that the configuration names, over `params`.

    DeepSpeed's "Adam" is AdamW unless adam_w_mode is false; "AdamW" is always.

    Raises ValueError for a type that hetero has not, and for unknown or wrong arguments.
    """
    kind = _KINDS.get(named.type.lower())
    if kind is None:
        names = ["Adam", "AdamW", "Lion", "Adagrad", "SGD"]
        raise ValueError(
            f"optimizer: hetero has no type {named.type!r}; "
            f"{nearest(named.type, names)} (Muon with Adam: hetero.initialize(model, [muon, "
            f"adam]))"
        )
    made, known = kind
    where = f"the params of the optimizer {named.type}"
    refuse_unknown(where, named.params, [*known, *_OF_TORCH])
    options: dict[str, Any] = dict(named.params)
    pop_torch_options(named.type, options)
    if made is HybridAdam:
        decoupled = options.pop("adam_w_mode", True) or named.type.lower() == "adamw"
        options["adamw_mode"] = bool(decoupled)
    if made is HybridLion:  # DeepSpeed's defaults
        options = {"lr": 1e-3, "betas": (0.9, 0.999), **options}
    if options.pop("torch_adam", False):
        log_not_needed(f"{named.type}: torch_adam", "hetero has one kernel")
        if options["adamw_mode"]:  # as torch.optim.AdamW has it
            options.setdefault("weight_decay", 1e-2)
    if options.pop(_STATES, True) is False:
        state_dtype = "bf16"
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    build: Any = made
    optimizer: HybridOptimizer = build(params, **options, state_dtype=state_dtype)
    return optimizer
