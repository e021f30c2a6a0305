"""native/update: the first pass of Muon against the oracle and torch; the second keeps momentum."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from offload import _native
from tests.support.native.update_arrays import Arrays, equal_bits, gradients, masters, to_fp32
from tests.support.native.update_oracle import Hyper, muon_momentum, stored

DTYPES = ["fp32", "bf16", "fp16"]
ISAS = _native.isa_available()
HYPERS = {
    "momentum": Hyper(momentum=0.95, grad_scale=0.3),
    "nesterov": Hyper(momentum=0.95, nesterov=True),
    "short": Hyper(momentum=0.3, nesterov=True, weight_decay=0.1, decoupled=True),
    "none": Hyper(momentum=0.0),
}


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy()


def momentum_pass(
    arrays: Arrays, kind: _native.UpdateKind, grad: np.ndarray, hyper: Hyper, index: int = 0
) -> np.ndarray:
    """The directions, as bits of bf16; the momentum of `arrays` is updated."""
    directions = np.zeros(len(grad) + 1, np.int16)
    directions[-1] = 7
    _native.update(
        kind,
        directions.ctypes.data,
        grad.ctypes.data,
        0 if arrays.master is None else arrays.master.ctypes.data,
        [arrays.states[0].ctypes.data],
        len(grad),
        _native.Hyper(**dataclasses.asdict(hyper)),
        index,
    )
    assert directions[-1] == 7  # nothing is written behind the end
    return directions[:-1]


@pytest.mark.covering(2)
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_the_oracles(hyper: Hyper, dtype: str, grad_dtype: str, state_dtype: str) -> None:
    """On every instruction set, of which the oracle knows nothing."""
    kind = _native.UpdateKind(dtype, grad_dtype, "muon_momentum", state_dtype)
    second = _native.UpdateKind(dtype, "bf16", "muon", state_dtype)
    for numel in (1, 16, 1003):
        on_isas = {isa: Arrays(second, masters(numel)) for isa in ISAS}
        buffer = np.zeros(numel, np.float32)
        for step in range(1, 4):
            now = dataclasses.replace(hyper, step=step)
            grad = gradients(numel, grad_dtype, seed=step)
            index = (1 << 32) - 500
            direction, buffer = muon_momentum(buffer, to_fp32(grad, grad_dtype), now)
            (buffer,) = stored("muon", dtype, state_dtype, (buffer,), step, index)
            for isa, arrays in on_isas.items():
                _native.set_isa(isa)
                weights = arrays.fp32_master().copy()
                found = momentum_pass(arrays, kind, grad, now, index)
                assert equal_bits(arrays.fp32_master(), weights), isa
                assert equal_bits(found, bf16_bits(direction)), isa
                assert equal_bits(arrays.fp32_states()[0], buffer), isa
                arrays.step(found.view(np.uint16), now, index=index)
                assert numel == 1 or not equal_bits(arrays.fp32_master(), weights), isa
                assert equal_bits(arrays.fp32_states()[0], buffer), isa


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_it_has_torchs_bits(isa: str, momentum: float, nesterov: bool) -> None:
    """torch fuses the same products and sums, where it computes with vectors."""
    _native.set_isa(isa)
    kind = _native.UpdateKind("fp32", "fp32", "muon_momentum")
    numel = 20_480
    arrays, buffer = Arrays(kind, masters(numel)), torch.zeros(numel)
    hyper = Hyper(momentum=momentum, nesterov=nesterov and momentum > 0)
    for step in range(1, 5):
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        found = momentum_pass(arrays, kind, grad.numpy(), hyper)
        buffer.lerp_(grad, 1 - momentum)
        wanted = grad.lerp(buffer, momentum) if nesterov else buffer
        assert equal_bits(found, bf16_bits(wanted.numpy()))
        assert equal_bits(arrays.states[0], buffer.numpy())
