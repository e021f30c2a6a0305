"""deepspeed.accelerator: where this process computes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

_OF_TORCH = ("get_rng_state", "set_rng_state", "manual_seed", "initial_seed")
_ANSWERS = {
    "is_available": True,  # there is a CPU
    "supported_dtypes": [torch.float32, torch.float16, torch.bfloat16],
    "is_fp16_supported": True,
    "is_bf16_supported": True,  # without the instructions it is slow
    "is_triton_supported": False,  # hetero has no kernels in Triton
}


class ComputeDevice:
    """torch.cuda under DeepSpeed's names, or, without a GPU, the CPU.

    Further names are those of torch.cuda, or of torch.cpu: memory_allocated(), synchronize(), ...
    Those that only a GPU has give None on a CPU, and memory is 0 there.
    """

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        self._name = "cuda" if self._on_gpu else "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda", with the index if it is given, or "cpu"."""
        indexed = self._on_gpu and device_index is not None
        return f"{self._name}:{device_index}" if indexed else self._name

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A block in which the device is the current one."""
        return torch.cuda.device(device_index or 0) if self._on_gpu else nullcontext()

    def current_device(self) -> int | str:
        """The number of the current device, or "cpu"."""
        return torch.cuda.current_device() if self._on_gpu else self._name

    def current_device_name(self) -> str:
        """The name of the current device, as torch takes it."""
        return self.device_name(torch.cuda.current_device() if self._on_gpu else None)

    def device_count(self) -> int:
        """GPUs, or, without one, processes of this machine."""
        local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
        return torch.cuda.device_count() if self._on_gpu else int(local)

    def communication_backend_name(self) -> str:
        """For torch.distributed."""
        return "nccl" if self._on_gpu else "gloo"

    def is_synchronized_device(self) -> bool:
        """Whether calls return when they are done, as on a CPU."""
        return not self._on_gpu

    resolves_data_dependency = use_host_timers = is_synchronized_device

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked memory, where there is a GPU."""
        return tensor.pin_memory() if self._on_gpu else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in page-locked memory."""
        return self._on_gpu and tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is where models compute."""
        return tensor.device.type == self._name

    def __getattr__(self, name: str) -> Any:
        if name in _ANSWERS:
            return lambda: _ANSWERS[name]
        if name == "manual_seed_all" or (name in _OF_TORCH and not self._on_gpu):
            return getattr(torch, name.removesuffix("_all"))
        if name.startswith("_") or not hasattr(torch.cuda, name):
            raise AttributeError(f"deepspeed.accelerator: hetero has no {name!r}")
        found = getattr(torch.cuda if self._on_gpu else torch.cpu, name, None)
        return found or (lambda *_, **__: 0 if "memory" in name else None)


@cache
def get_accelerator() -> ComputeDevice:
    """Where this process computes."""
    return ComputeDevice()
