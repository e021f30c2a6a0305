"""Adam in the operation order that native/adam_kernel.inl.h documents, in numpy, bit for bit.

A fused multiply-add is emulated in float64: the product of two fp32 values is exact there, the sum
is rounded to odd, and rounding that to fp32 then gives what one rounding of the exact value gives,
because 53 bits are more than 24 + 2 (Boldo and Melquiond, "Emulation of FMA and correctly rounded
sums: proved algorithms using rounding to odd", 2008).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Fp32 = NDArray[np.float32]


@dataclass(frozen=True)
class Hyper:
    """The arguments of AdamHyper."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    bias_correction: bool = True
    step: int = 1


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


def update(
    w: Fp32, m: Fp32, v: Fp32, grad: Fp32, hyper: Hyper, grad_scale: float = 1.0
) -> tuple[Fp32, Fp32, Fp32]:
    """The new (w, m, v). `w` is the fp32 master, `grad` the gradient converted to fp32."""
    f32 = np.float32
    correction1 = 1.0 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1.0 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    with np.errstate(all="ignore"):
        g = grad * f32(grad_scale)
        if hyper.weight_decay != 0 and not hyper.decoupled:
            g = fma(f32(hyper.weight_decay), w, g)
        if hyper.weight_decay != 0 and hyper.decoupled:
            w = w * f32(1.0 - hyper.lr * hyper.weight_decay)
        m = fma(f32(1.0 - hyper.beta1), g, f32(hyper.beta1) * m)
        v = fma(f32(1.0 - hyper.beta2) * g, g, f32(hyper.beta2) * v)
        d = fma(np.sqrt(v), f32(1.0 / math.sqrt(correction2)), np.full_like(v, hyper.eps))
        w = fma(f32(-(hyper.lr / correction1)), m / d, w)
    return w, m, v


def split(master: Fp32) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint32]]:
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
