"""deepspeed.accelerator: where this process computes."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

_ANSWERS = {
    "is_available": True,  # there is a CPU
    "supported_dtypes": [torch.float32, torch.float16, torch.bfloat16],
    "is_fp16_supported": True,
    "is_bf16_supported": True,  # without the instructions it is slow
    "is_triton_supported": False,  # hetero has no kernels in Triton
}
_ON_CPU = {
    "current_device": "cpu",
    "device_count": int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1),
}


class ComputeDevice:
    """torch.cuda under DeepSpeed's names, or, without a GPU, the CPU.

    Further names are those of torch.cuda, or of torch.cpu: memory_allocated(), synchronize(), ...
    Those that only a GPU has give None on a CPU, and memory is 0 there.
    """

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_available()
        self._name = "cuda" if on_gpu else "cpu"
        backend = {"communication_backend_name": "nccl" if on_gpu else "gloo"}
        waits = dict.fromkeys(
            ("is_synchronized_device", "resolves_data_dependency", "use_host_timers"), not on_gpu
        )
        self._answers = {**_ANSWERS, **backend, **waits, **({} if on_gpu else _ON_CPU)}

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda", with the index if it is given, or "cpu"."""
        has_index = self._name == "cuda" and device_index is not None
        return f"{self._name}:{device_index}" if has_index else self._name

    def current_device_name(self) -> str:
        """The name of the current device, as torch takes it."""
        return self.device_name(torch.cuda.current_device() if self._name == "cuda" else None)

    def device(self, device_index: int | None = None) -> Any:
        """A block in which the device is the current one."""
        return torch.cuda.device(device_index or 0) if self._name == "cuda" else nullcontext()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked memory, where there is a GPU."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in page-locked memory."""
        return self._name == "cuda" and tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is where models compute."""
        return tensor.device.type == self._name

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("_answers", {}):
            return lambda: self._answers[name]
        if name.startswith("_") or not hasattr(torch.cuda, name):
            raise AttributeError(f"deepspeed.accelerator: hetero has no {name!r}")
        if self._name == "cpu" and ("rng_state" in name or "seed" in name):
            return getattr(torch, name.removesuffix("_all"))
        found = getattr(getattr(torch, self._name), name, None)
        return found or (lambda *_, **__: 0 if "memory" in name else None)


@cache
def get_accelerator() -> ComputeDevice:
    """Where this process computes."""
    return ComputeDevice()
