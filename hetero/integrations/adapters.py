"""Models with adapters of PEFT: what of them is saved."""

from __future__ import annotations

from typing import Any

import torch


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether it is a model of the peft library."""
    return bool(getattr(model, "peft_config", None))


@torch.no_grad()
def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the adapters' parameters, by their names in the model's state_dict(), in fp32 RAM
    or whatever dtype they compute in.

    These are what peft's save_pretrained() would choose from the whole state_dict(), which has all
    of the frozen model, and is not made for it. What is trained of the model itself (biases,
    modules_to_save) is among them.
    """
    marks = [f".{name}" for name in model.peft_config]
    found = {}
    for name, param in model.named_parameters():
        if param.requires_grad or any(f"{mark}." in f"{name}." for mark in marks):
            found[name] = param.detach().clone()
    return found
