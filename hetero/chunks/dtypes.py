"""Compute dtypes: their names, and the bytes each kind of state takes per element."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch

from offload._native import UpdateKind

DtypeName = Literal["bf16", "fp16", "fp32"]
StateDtypeName = Literal["fp32", "bf16"]
RuleName = Literal["adam", "lion", "adagrad", "sgd", "muon"]

_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one chunk group, and what they say about updates.

    Attributes:
        compute: of parameters.
        grad: of kept gradients.
        rule: of the optimizer; says how many states there are per parameter.
        state: of the rule's states.
        reduce: of gradients on their way between ranks; None: `grad`.
        device_updates: a DEVICE with memory of its own may keep optimizer state, and updates it.
    """

    compute: DtypeName
    grad: DtypeName
    rule: RuleName = "adam"
    state: StateDtypeName = "fp32"
    reduce: DtypeName | None = None
    device_updates: bool = True

    @property
    def torch_compute(self) -> torch.dtype:
        """torch's dtype of parameters."""
        return _TORCH[self.compute]

    @property
    def torch_grad(self) -> torch.dtype:
        """torch's dtype of kept gradients."""
        return _TORCH[self.grad]

    @property
    def param_bytes(self) -> int:
        """Bytes of PARAM per element."""
        return self.torch_compute.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of GRAD per element."""
        return self.torch_grad.itemsize

    @property
    def torch_reduce(self) -> torch.dtype:
        """torch's dtype of gradients on their way between ranks."""
        return _TORCH[self.reduce or self.grad]

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient's element on its way between ranks."""
        return self.torch_reduce.itemsize

    @property
    def kind(self) -> UpdateKind:
        """The native kernel's name for this combination of dtypes and rule."""
        return UpdateKind(self.compute, self.grad, self.rule, self.state)

    @property
    def passes(self) -> Sequence[UpdateKind]:
        """The kinds of what the native kernels do for one update, in order.

        Muon's first pass writes directions, in bf16, which are the second one's gradients.
        """
        if self.rule != "muon":
            return [self.kind]
        return [
            UpdateKind(self.compute, self.grad, "muon_momentum", self.state),
            UpdateKind(self.compute, "bf16", "muon", self.state),
        ]

    @property
    def update_bytes(self) -> int:
        """Bytes per element that one update reads and writes."""
        return sum(kind.bytes_moved for kind in self.passes)

    @property
    def torch_state(self) -> torch.dtype:
        """torch's dtype of optimizer states."""
        return _TORCH[self.state]

    @property
    def master_bytes(self) -> int:
        """Bytes of the master part of OPTIM_STATE per element."""
        return self.optim_state_bytes - self.kind.states * self.torch_state.itemsize

    @property
    def optim_state_bytes(self) -> int:
        """Bytes of OPTIM_STATE per element."""
        return self.kind.optim_state_bytes


def check_dtype(name: str, option: str) -> DtypeName:
    """The short name of a dtype that is given by its short or long name, or as torch's dtype.

    Raises:
        ValueError: it is none of bf16, fp16 and fp32; the message names `option`.
    """
    text = _short_name(name)
    if text not in get_args(DtypeName):
        raise ValueError(f"{option} must be one of bf16, fp16, fp32, not {name!r}")
    return cast(DtypeName, text)


def check_state_dtype(name: str) -> StateDtypeName:
    """The short name of a dtype for the rule's states, which need more range than fp16's.

    Raises:
        ValueError: it is neither fp32 nor bf16.
    """
    text = _short_name(name)
    if text not in get_args(StateDtypeName):
        raise ValueError(f"state_dtype must be fp32 or bf16, not {name!r}")
    return cast(StateDtypeName, text)


def _short_name(name: object) -> str:
    text = str(name).removeprefix("torch.")
    names = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
    return names.get(text, text)


def default_dtype(cuda: bool = False) -> DtypeName:
    """bf16 if the compute device (CUDA's current one, or the CPU) multiplies it, else fp32."""
    if cuda:
        return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp32"
    return "bf16" if _cpu_has_bf16() else "fp32"


def _cpu_has_bf16() -> bool:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            lines = [line for line in cpuinfo if line.startswith(("flags", "Features"))]
    except OSError:
        return platform.machine() == "arm64"  # Apple silicon from M2; M1 emulates it well
    flags = set(lines[0].split(":", 1)[1].split()) if lines else set()
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
