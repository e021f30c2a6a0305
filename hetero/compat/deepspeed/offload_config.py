"""What engine.offload_states() takes."""

from __future__ import annotations

from enum import Enum


class OffloadDeviceEnum(str, Enum):
    """Where what is offloaded lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What can be offloaded."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
