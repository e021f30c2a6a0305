"""What is no managed parameter, on its way to the device where the model computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hetero.chunk_groups.chunk_group import Shared
from offload.memory.tiers import Tier

_MOST_STAGED_BYTES = 64 << 20


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, or a copy of it on `device` if it is in RAM and `device` is not."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor
    if tensor.nbytes > _MOST_STAGED_BYTES:
        # CUDA may read it later, when its owner may have changed it; so the host waits.
        return tensor.to(device)
    # By a copy that nobody changes the host need not wait for the device, which has all of the last
    # step to do yet. torch keeps the page-locked memory until the device has read it.
    staged = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return staged.to(device, non_blocking=True)


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
