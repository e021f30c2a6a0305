"""Param groups in the words of torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetero.checkpoint.plain_data import pack

_OWN = ("bias_correction", "adamw_mode")


def torch_options(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of a param group as torch's optimizer of the same rule has them.

    What torch alone has (amsgrad, foreach, ...) has torch's defaults, so that its load finds all
    that it looks for. Lion, which torch has not, keeps hetero's options.

    Args:
        options: without "params".
        where: what errors call the param group.

    Raises:
        ValueError: torch has no such update, or an option is no plain data.
    """
    pack(dict(options), where, [])
    torch_class = _torch_class(options)
    if torch_class is None:
        return dict(options)
    if not options.get("bias_correction", True):
        raise ValueError(
            f"{where} has bias_correction=False, which torch's {torch_class.__name__} lacks; "
            f"keep such an optimizer by hetero.save()"
        )
    defaults: dict[str, Any] = torch_class([torch.zeros(1, 1)]).defaults
    return {**defaults, **{name: value for name, value in options.items() if name not in _OWN}}


def _torch_class(options: Mapping[str, Any]) -> Any:
    """torch's optimizer of the rule that has these options; None for Lion."""
    if "adamw_mode" in options:
        return torch.optim.AdamW if options["adamw_mode"] else torch.optim.Adam
    own_options = {"lr_decay": "Adagrad", "dampening": "SGD", "ns_steps": "Muon"}
    names = [name for option, name in own_options.items() if option in options]
    return getattr(torch.optim, names[0], None) if names else None
