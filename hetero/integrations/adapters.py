"""Models with adapters of PEFT: what of them is saved."""

from __future__ import annotations

from typing import Any

import torch

from hetero.api.access import engine_of, gathered


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


def merged(model: Any) -> Any:
    """The model that the adapters were put on, with their products added to its weights.

    As peft's merge_and_unload(), layer by layer, for one rank or several: each layer's weights are
    whole in memory while it is merged, and no others. Its parameters are then of the compute dtype,
    as merge_and_unload() makes them. All ranks call it; the model with adapters is used up.

    Args:
        model: of peft, and managed by hetero; its adapters are such as peft can merge (LoRA).

    Returns:
        what peft's unload() does; hetero.save_pretrained() exports it.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    leads = engine_of(model.parameters()).world.rank == 0
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            params = list(layer.parameters())  # type: ignore[attr-defined]
            with gathered(params, modifier_rank=0):
                if leads:
                    layer.merge()
    return model.unload()
