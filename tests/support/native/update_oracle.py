"""The updates in the order that native/update/kernels/update_rules.inl.h documents, in numpy, bit
for bit.

A fused multiply-add is emulated in float64: the product of two fp32 values is exact there, the sum
is rounded to odd, and rounding that to fp32 then gives what one rounding of the exact value gives,
because 53 bits are more than 24 + 2 (Boldo and Melquiond, "Emulation of FMA and correctly rounded
sums: proved algorithms using rounding to odd", 2008).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.support.native import state_blocks

Fp32 = NDArray[np.float32]
Words = NDArray[np.uint32]
States = tuple[Fp32, ...]
f32 = np.float32

STATES = {"adam": 2, "lion": 1, "adagrad": 1, "sgd": 1, "muon": 1, "muon_momentum": 1}


@dataclass(frozen=True)
class Hyper:
    """The arguments of _native.Hyper."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    decoupled: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    bias_correction: bool = True
    lr_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    lr_scale: float = 1.0
    step: int = 1
    grad_scale: float = 1.0


def fma(a: Fp32 | np.float32, b: Fp32 | np.float32, c: Fp32) -> Fp32:
    """a * b + c of fp32 values, rounded once."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = c.astype(np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)  # TwoSum: total + error is exact
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    inexact = np.isfinite(total) & (error != 0)
    return np.where(inexact & even, odd, total).astype(np.float32)


def flush(state: Fp32) -> Fp32:
    """The state with +0 for what is smaller than the smallest normal number."""
    return np.where(np.abs(state) < np.finfo(np.float32).tiny, f32(0), state)


def update(rule: str, w: Fp32, states: States, grad: Fp32, hyper: Hyper) -> tuple[Fp32, States]:
    """The new (w, states), before the states are stored. `w` is the fp32 master, `grad` in fp32."""
    with np.errstate(all="ignore"):
        g = grad * f32(hyper.grad_scale)
        if hyper.weight_decay != 0 and hyper.decoupled:
            w = w * f32(1.0 - hyper.lr * hyper.weight_decay)
        elif hyper.weight_decay != 0:
            g = fma(f32(hyper.weight_decay), w, g)
        rules = {"adam": _adam, "lion": _lion, "adagrad": _adagrad, "sgd": _sgd, "muon": _muon}
        w, states = rules[rule](w, states, g, hyper)
        return w, tuple(flush(state) for state in states)


def _adam(w: Fp32, states: States, g: Fp32, hyper: Hyper) -> tuple[Fp32, States]:
    m, v = states
    correction1 = 1.0 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1.0 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    m = fma(f32(1.0 - hyper.beta1), g, f32(hyper.beta1) * m)
    v = fma(f32(1.0 - hyper.beta2) * g, g, f32(hyper.beta2) * v)
    d = fma(np.sqrt(v), f32(1.0 / math.sqrt(correction2)), np.full_like(v, hyper.eps))
    return fma(f32(-(hyper.lr / correction1)), m / d, w), (m, v)


def _lion(w: Fp32, states: States, g: Fp32, hyper: Hyper) -> tuple[Fp32, States]:
    (m,) = states
    c = fma(f32(1.0 - hyper.beta1), g, f32(hyper.beta1) * m)
    w = fma(f32(-hyper.lr), np.sign(c), w)
    return w, (fma(f32(1.0 - hyper.beta2), g, f32(hyper.beta2) * m),)


def _adagrad(w: Fp32, states: States, g: Fp32, hyper: Hyper) -> tuple[Fp32, States]:
    s = fma(g, g, states[0])
    rate = hyper.lr / (1.0 + (hyper.step - 1.0) * hyper.lr_decay)
    return fma(f32(-rate), g / (np.sqrt(s) + f32(hyper.eps)), w), (s,)


def _sgd(w: Fp32, states: States, g: Fp32, hyper: Hyper) -> tuple[Fp32, States]:
    (b,) = states
    if hyper.momentum != 0:
        dampening = 0.0 if hyper.step == 1 else hyper.dampening
        b = fma(f32(1.0 - dampening), g, f32(hyper.momentum) * b)
        g = fma(f32(hyper.momentum), b, g) if hyper.nesterov else b
    return fma(f32(-hyper.lr), g, w), (b,)


def _muon(w: Fp32, states: States, g: Fp32, hyper: Hyper) -> tuple[Fp32, States]:
    return fma(f32(-(hyper.lr * hyper.lr_scale)), g, w), states


def muon_momentum(b: Fp32, grad: Fp32, hyper: Hyper) -> tuple[Fp32, Fp32]:
    """The direction and the momentum after the first pass of Muon."""
    with np.errstate(all="ignore"):
        g = grad * f32(hyper.grad_scale)
        b = _lerp(b, g, f32(1.0 - hyper.momentum))
        direction = _lerp(g, b, f32(hyper.momentum)) if hyper.nesterov else b
        return direction, flush(b)


def _lerp(x: Fp32, y: Fp32, weight: np.float32) -> Fp32:
    if weight < 0.5:
        return fma(weight, y - x, x)
    return fma(weight - f32(1.0), y - x, y)


def random_bits(step: int, index: int, numel: int) -> Words:
    """32 bits for each of the elements `index`, `index` + 1, ..."""
    every = (1 << 64) - 1
    x = step * 0x9E3779B97F4A7C15 & every
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & every
    x = (x ^ x >> 27) * 0x94D049BB133111EB & every
    key = (x ^ x >> 31) >> 32
    numbers = (np.arange(numel, dtype=np.uint64) + np.uint64(index & 0xFFFFFFFF)).astype(np.uint32)
    words = numbers ^ np.uint32(key)
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x21F0AAAD)
    words ^= words >> np.uint32(15)
    words *= np.uint32(0xD35A2D97)
    return words ^ words >> np.uint32(15)


def has_lowest_carrier(rule: str, dtype: str) -> bool:
    """Whether the last state gives its lowest bit to the split of a bf16 parameter."""
    return rule not in ("adam", "adagrad") and dtype == "bf16"


def stored(
    rule: str, dtype: str, state_dtype: str, states: States, step: int, index: int = 0
) -> States:
    """The states as the next update finds them: rounded, and without the carry."""
    random = random_bits(step, index, len(states[0]))
    result = []
    if state_dtype == "8bit":
        for i, state in enumerate(states):
            signed = state_blocks.is_signed(rule, i)
            words = random >> np.uint32(13) if i == 1 else random
            blocks = state_blocks.encode(state, signed, words)
            result.append(state_blocks.decode(blocks, len(state), signed))
        return tuple(result)
    for i, state in enumerate(states):
        dropped = 16 * (state_dtype == "bf16")
        dropped += has_lowest_carrier(rule, dtype) and i == len(states) - 1
        low = np.uint32((1 << dropped) - 1)
        words = state.view(np.uint32)
        if state_dtype == "bf16":
            words = words + (random >> np.uint32(16 * i) & low)
            words = np.where(np.isnan(state), np.uint32(0x7FC00000), words)
        result.append((words & ~low).view(np.float32))
    return tuple(result)


def without_tie(master: Fp32) -> Fp32:
    """Masters as they are kept where no state has a bit for the carry (split_master.inl.h)."""
    bits = master.view(np.uint32)
    tie = (bits & np.uint32(0x1FFFF)) == 0x18000
    return (bits + tie.astype(np.uint32)).view(np.float32)


def split(master: Fp32) -> tuple[NDArray[np.uint16], NDArray[np.uint16], Words]:
    """(param, remainder, carry) of the bf16 split, in plain integers."""
    bits = master.view(np.uint32).astype(np.uint64)
    upper = bits >> 16
    remainder = bits & 0xFFFF
    up = (remainder > 0x8000) | ((remainder == 0x8000) & (upper % 2 == 1))
    carry = up.astype(np.uint64)
    param = upper + carry
    nan = np.isnan(master)
    return (
        np.where(nan, 0x7FC0, param).astype(np.uint16),
        np.where(nan, 0, remainder).astype(np.uint16),
        np.where(nan, 0, carry).astype(np.uint32),
    )
