"""DeepSpeed's optimizers by their names and arguments, and the one that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.api.optimizer import HybridOptimizer, ParamGroups
from hetero.api.optimizers import CPUAdam, HybridAdagrad, HybridAdam, HybridLion, HybridSGD
from hetero.compat.deepspeed.options import Named
from hetero.compat.key_table import nearest, refuse_unknown
from hetero.compat.renamed_optimizers import (
    OF_TORCH,
    own_options,
    pop_torch_options,
    renamed,
)

_LION = {"lr": 1e-3, "betas": (0.9, 0.999)}  # DeepSpeed's defaults


_LION_ARGUMENTS = "lr betas weight_decay"
_EXACT = "fp32_optimizer_states"  # False: states are kept in bf16

DeepSpeedCPUAdam = renamed(
    __name__,
    "DeepSpeedCPUAdam",
    CPUAdam,
    f"model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode {_EXACT}",
)
FusedAdam = renamed(
    __name__,
    "FusedAdam",
    HybridAdam,
    "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
)
DeepSpeedCPULion = renamed(
    __name__, "DeepSpeedCPULion", HybridLion, f"model_params {_LION_ARGUMENTS} {_EXACT}", **_LION
)
FusedLion = renamed(
    __name__, "FusedLion", HybridLion, f"params {_LION_ARGUMENTS} set_grad_none", **_LION
)
DeepSpeedCPUAdagrad = renamed(
    __name__,
    "DeepSpeedCPUAdagrad",
    HybridAdagrad,
    f"model_params lr eps weight_decay amsgrad {_EXACT}",
)

_ADAM = f"lr betas eps weight_decay bias_correction adam_w_mode torch_adam {_EXACT}"
# By the name in lower case: the class, and the options that it takes.
_KINDS: Mapping[str, tuple[type[HybridOptimizer], str]] = {
    "adam": (HybridAdam, _ADAM),
    "adamw": (HybridAdam, _ADAM),
    "lion": (HybridLion, f"{_LION_ARGUMENTS} {_EXACT}"),
    "adagrad": (HybridAdagrad, f"lr lr_decay eps weight_decay {_EXACT}"),
    "sgd": (HybridSGD, "lr momentum dampening weight_decay nesterov"),
}


def make_optimizer(named: Named, params: ParamGroups, state_dtype: str) -> HybridOptimizer:
    """The optimizer that the configuration names, over `params`.

    DeepSpeed's "Adam" is AdamW unless adam_w_mode is false; "AdamW" is always.

    Raises ValueError for a type that hetero has not, and for unknown or wrong arguments.
    """
    kind = named.type.lower()
    if kind not in _KINDS:
        names = ["Adam", "AdamW", "Lion", "Adagrad", "SGD"]
        raise ValueError(
            f"optimizer: hetero has no type {named.type!r}; {nearest(named.type, names)} (Muon "
            f"with Adam: hetero.initialize(model, [muon, adam]))"
        )
    made, known = _KINDS[kind]
    refuse_unknown(
        f"the params of the optimizer {named.type}", named.params, [*known.split(), *OF_TORCH]
    )
    given: dict[str, Any] = {**(_LION if kind == "lion" else {}), **named.params}
    pop_torch_options(named.type, given)
    options = own_options(named.type, given)
    if made is HybridAdam:
        options["adamw_mode"] = kind == "adamw" or bool(options.get("adamw_mode", True))
        if given.get("torch_adam") and options["adamw_mode"]:  # as torch.optim.AdamW has it
            options.setdefault("weight_decay", 1e-2)
    if options.get("state_dtype") != "bf16":
        options["state_dtype"] = state_dtype
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    build: Any = made
    optimizer: HybridOptimizer = build(params, **options)
    return optimizer
