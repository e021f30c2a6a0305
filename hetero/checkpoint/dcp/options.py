"""Param groups in the words of torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetero.checkpoint.plain_data import pack

_OWN = ("bias_correction", "adamw_mode")


def torch_options(rule_class: str, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of a param group as torch's optimizer of the same rule has them.

    What torch alone has (amsgrad, foreach, ...) has torch's defaults, so that its load finds all
    that it looks for. Lion, which torch has not, keeps hetero's options.

    Args:
        rule_class: the name of hetero's optimizer.
        options: without "params".
        where: what errors call the param group.

    Raises:
        ValueError: torch has no such update, or an option is no plain data.
    """
    pack(dict(options), where, [])
    torch_class = _torch_class(rule_class, options)
    if torch_class is None:
        return dict(options)
    if not options.get("bias_correction", True):
        raise ValueError(
            f"{where} has bias_correction=False, which torch's {torch_class.__name__} has not; "
            f"keep such an optimizer by hetero.save()"
        )
    defaults: dict[str, Any] = torch_class([torch.zeros(1, 1)]).defaults
    return {**defaults, **{name: value for name, value in options.items() if name not in _OWN}}


def _torch_class(rule_class: str, options: Mapping[str, Any]) -> Any:
    if rule_class in ("HybridAdam", "CPUAdam"):
        return torch.optim.AdamW if options.get("adamw_mode", True) else torch.optim.Adam
    name = rule_class.removeprefix("Hybrid")
    return getattr(torch.optim, name, None) if name in ("SGD", "Adagrad", "Muon") else None
