"""What is no managed parameter, on its way to the device where the model computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetero.chunk_groups.shared import Shared
from offload.memory.tiers import Tier


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, or a copy of it on `device` if it is in RAM and `device` is not."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor
    # Of pageable memory CUDA has taken a copy when this returns. Pinned memory it reads later, when
    # its owner may have changed it; so then the host waits.
    return tensor.to(device, non_blocking=not tensor.is_pinned())


@torch.no_grad()
def move_rest(model: torch.nn.Module, managed: Iterable[int], shared: Shared) -> None:
    """Moves buffers, and parameters whose ids are not in `managed`, to the backend's device.

    It waits until they are there: the first forward may be in any stream of the user's, which does
    not wait for the one that copies here.

    Raises BudgetError, naming the parameter, if a parameter does not fit device_memory.
    """
    if not shared.backend.in_order:  # it is done where the CPU reads it
        return
    device = shared.backend.device
    known = set(managed)
    for name, param in model.named_parameters():
        if id(param) not in known:
            shared.unmanaged.charge(param, Tier.DEVICE, name)
            param.data = param.data.to(device)
    moved: dict[int, torch.Tensor] = {}  # modules may share a buffer
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
    shared.backend.synchronize()
