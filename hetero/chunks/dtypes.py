"""Compute dtypes: their names, and the bytes each kind of state takes per element."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch.nn.parameter import UninitializedParameter

from offload._native import UpdateKind
from offload.errors import HeteroError
from offload.memory.sizes import format_bytes

DtypeName = Literal["bf16", "fp16", "fp32"]
StateDtypeName = Literal["fp32", "bf16", "8bit"]
RuleName = Literal["adam", "lion", "adagrad", "sgd", "muon"]

_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Of states in 8 bits the bytes of state blocks are kept, and no array of elements.
_TORCH_STATE = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
_LEAST_ITEM_BYTES = 2  # of floating-point elements that the compute dtype may replace
# A multiple of everything that bytes of states are rounded up to.
_MANY_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one chunk group, and what they say about updates.

    Attributes:
        compute: of parameters.
        grad: of kept gradients.
        rule: of the optimizer; says how many states there are per parameter.
        state: of the rule's states; "8bit" is no dtype of torch's, but codes in state blocks.
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
    def update_bytes(self) -> float:
        """Bytes per element that one update reads and writes, exact."""
        return sum(kind.bytes_moved(_MANY_ELEMENTS) for kind in self.passes) / _MANY_ELEMENTS

    @property
    def torch_state(self) -> torch.dtype:
        """torch's dtype of the arrays that keep the rule's states; uint8 for state blocks."""
        return _TORCH_STATE[self.state]

    @property
    def master_bytes(self) -> int:
        """Bytes of the master part of OPTIM_STATE per element."""
        return self.kind.state_at(0, 1)

    def optim_state_bytes(self, tile_numel: int) -> int:
        """Bytes of OPTIM_STATE of a tile of `tile_numel` elements, in whole pages."""
        return self.kind.optim_state_bytes(tile_numel)

    @property
    def home_bytes(self) -> float:
        """Bytes of PARAM, GRAD and OPTIM_STATE per element, exact."""
        optim_state_bytes = self.optim_state_bytes(_MANY_ELEMENTS) / _MANY_ELEMENTS
        return self.param_bytes + self.grad_bytes + optim_state_bytes


def check_dtype(name: str, option: str) -> DtypeName:
    """The short name of a dtype that is given by its short or long name, or as torch's dtype.

    Raises:
        ValueError: it is none of bf16, fp16 and fp32; the message names `option`.
    """
    text = _short_name(name)
    if text not in get_args(DtypeName):
        raise ValueError(f"{option} must be one of bf16, fp16, fp32, not {name!r}")
    return cast(DtypeName, text)


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """torch's dtype of that name. Raises ValueError as check_dtype()."""
    name = check_dtype(str(dtype), "dtype")
    return Dtypes(name, name).torch_compute


def check_state_dtype(name: str) -> StateDtypeName:
    """How the rule's states are kept: "8bit", or a dtype's short name. fp16 has too little range.

    Raises:
        ValueError: it is none of fp32, bf16 and 8bit.
    """
    text = _short_name(name)
    if text not in get_args(StateDtypeName):
        raise ValueError(f"state_dtype must be fp32, bf16 or 8bit, not {name!r}")
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


def is_manageable(param: torch.Tensor, name: str) -> bool:
    """Returns whether a parameter can get a place in a chunk, as those of floating point do.

    Raises:
        HeteroError: its elements are floating-point numbers of less than 16 bits: in the compute
            dtype they would take twice the memory, and no scales beside them would fit any more.
            Or it has no shape yet.
    """
    if isinstance(param, UninitializedParameter):
        raise HeteroError(
            f"{name} is a parameter of a lazy module and has no shape yet; give the module its "
            f"sizes (nn.Linear in the place of nn.LazyLinear), or build the model outside "
            f"ZeroInitContext and run it once before hetero.initialize()"
        )
    if not param.is_floating_point():
        return False
    if param.element_size() < _LEAST_ITEM_BYTES:
        nbytes = param.numel() * param.element_size()
        raise HeteroError(
            f"{name} of shape {tuple(param.shape)} is {param.dtype}, of {format_bytes(nbytes)} "
            f"({nbytes} bytes), which hetero does not manage; convert it first, with its scales if "
            f"it has any (.to(torch.bfloat16)), or register it as a buffer, which keeps its dtype "
            f"and stays outside the budgets"
        )
    return True


def unmanaged_bytes(params: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of those parameters that get no place in a chunk."""
    return sum(p.numel() * p.element_size() for p in params if not p.is_floating_point())
