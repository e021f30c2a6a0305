"""What is no managed parameter, on its way to the device where the model computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, or a copy of it on `device` if it is in RAM and `device` is not."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor
    # Of pageable memory CUDA has taken a copy when this returns. Pinned memory it reads later, when
    # its owner may have changed it; so then the host waits.
    return tensor.to(device, non_blocking=not tensor.is_pinned())


@torch.no_grad()
def move_rest(model: torch.nn.Module, managed: Iterable[int], device: torch.device) -> None:
    """Moves buffers, and parameters whose ids are not in `managed`, to `device`."""
    if device.type == "cpu":
        return
    known = set(managed)
    moved: dict[int, torch.Tensor] = {}  # modules may share a buffer
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), to_device(buffer, device))
        for param in module._parameters.values():
            if param is not None and id(param) not in known:
                param.data = to_device(param.data, device)
