"""What one parameter trains with, held in numpy as the kernels want it."""

import dataclasses

import numpy as np
import torch

from offload import _native
from tests.support.native import state_blocks
from tests.support.native.update_oracle import Hyper, States, has_lowest_carrier

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WORDS = {"fp32": np.uint32, "bf16": np.uint16, "fp16": np.uint16, "8bit": np.uint8}


def unaligned(values: np.ndarray, offset: int) -> np.ndarray:
    """A copy whose address is `offset` bytes after a multiple of 64."""
    raw = np.empty(values.nbytes + 64 + offset, np.uint8)
    begin = -raw.ctypes.data % 64 + offset
    copy = raw[begin : begin + values.nbytes].view(values.dtype)
    copy[:] = values
    return copy


def to_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values as torch converts them, in the bits of `dtype`."""
    converted = torch.from_numpy(np.ascontiguousarray(values)).to(TORCH_DTYPES[dtype])
    signed = {2: torch.int16, 4: torch.int32}[converted.itemsize]
    return converted.view(signed).numpy().view(WORDS[dtype])


def to_fp32(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The values of `dtype` bits."""
    signed = bits.view({2: np.int16, 4: np.int32}[bits.itemsize])
    return torch.from_numpy(signed).view(TORCH_DTYPES[dtype]).float().numpy()


def equal_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether the arrays have the same bytes."""
    return left.tobytes() == right.tobytes()


def gradients(numel: int, dtype: str, seed: int) -> np.ndarray:
    """Bits of `dtype`; of magnitudes from subnormal to large, some of them zero."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(numel) * 10.0 ** random.uniform(-9, 3, numel)
    values[random.random(numel) < 0.05] = 0.0
    return to_dtype(values.astype(np.float32), dtype)


def masters(numel: int, seed: int = 1) -> np.ndarray:
    """fp32 values like a model's, of many magnitudes."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(numel) * 10.0 ** random.uniform(-6, 1, numel)).astype(np.float32)


def param_dtype(kind: _native.UpdateKind) -> str:
    """Of what an update has in the parameter's place."""
    return "bf16" if kind.rule == "muon_momentum" else kind.dtype


class Arrays:
    """A parameter of `kind` with value `master` and zero states, `offset` bytes off alignment."""

    def __init__(self, kind: _native.UpdateKind, master: np.ndarray, offset: int = 0) -> None:
        self.kind = kind
        words = WORDS[kind.state_dtype]
        count = kind.state_bytes(len(master)) // np.dtype(words).itemsize
        self.states = [unaligned(np.zeros(count, words), offset) for _ in range(kind.states)]
        self.param = unaligned(to_dtype(master, param_dtype(kind)), offset)
        self.master: np.ndarray | None = None
        if kind.dtype == "fp16":
            self.master = unaligned(master, offset)
        elif kind.dtype == "bf16":
            self.master = unaligned(np.zeros(len(master), np.uint16), offset)
            self.split(unaligned(master, offset))

    def split(self, source: np.ndarray) -> None:
        """Takes fp32 values as the master; of the states only the carries change."""
        assert self.master is not None
        _native.split_master(
            self.kind,
            source.ctypes.data,
            self.param.ctypes.data,
            self.master.ctypes.data,
            self._carrier_address(),
            len(source),
        )

    def _carrier_address(self) -> int:
        return 0 if self.kind.carrier == "remainder" else self.states[-1].ctypes.data

    def step(
        self,
        grad: np.ndarray,
        hyper: Hyper,
        begin: int = 0,
        end: int | None = None,
        index: int = 0,
    ) -> None:
        """Updates elements [begin, end); element 0 has the number `index`. In 8 bits `begin` is
        that of a state block."""
        end = len(grad) if end is None else end

        def at(array: np.ndarray) -> int:
            return array.ctypes.data + begin * array.itemsize

        _native.update(
            self.kind,
            at(self.param),
            at(grad),
            0 if self.master is None else at(self.master),
            [state.ctypes.data + self.kind.state_bytes(begin) for state in self.states],
            end - begin,
            _native.Hyper(**dataclasses.asdict(hyper)),
            index + begin,
        )

    def fp32_master(self) -> np.ndarray:
        """The exact fp32 master."""
        if self.kind.dtype == "fp32":
            return self.param.view(np.float32)
        assert self.master is not None
        if self.kind.dtype == "fp16":
            return self.master
        target = np.empty(len(self.param), np.float32)
        _native.join_master(
            self.kind,
            self.param.ctypes.data,
            self.master.ctypes.data,
            self._carrier_address(),
            target.ctypes.data,
            len(target),
        )
        return target

    def fp32_states(self) -> States:
        """The states' values, without the carries."""
        kind = self.kind
        if kind.state_dtype == "8bit":
            signs = [state_blocks.is_signed(kind.rule, i) for i in range(kind.states)]
            pairs = zip(self.states, signs, strict=True)
            return tuple(state_blocks.decode(s, len(self.param), signed) for s, signed in pairs)
        words = [state.copy() for state in self.states]
        if kind.dtype == "bf16":
            one = words[-1].dtype.type(1)
            lowest = has_lowest_carrier(kind.rule, kind.dtype)
            words[-1] &= ~(one if lowest else one << (8 * one.itemsize - 1))
        return tuple(to_fp32(state, kind.state_dtype) for state in words)

    def bytes(self) -> bytes:
        """All arrays."""
        master = [] if self.master is None else [self.master]
        return b"".join(part.tobytes() for part in [self.param, *self.states, *master])
