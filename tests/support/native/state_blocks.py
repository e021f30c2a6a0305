"""State blocks as native/update/kernels/state_block.inl.h documents them, in numpy, bit for bit."""

import numpy as np
from numpy.typing import NDArray

Fp32 = NDArray[np.float32]
Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
f32, u32 = np.float32, np.uint32

NUMEL = 64
NBYTES = 4 + NUMEL
ONE = {True: 120, False: 240}  # the code of 1, by whether the state has a sign


def state_bytes(numel: int) -> int:
    """Bytes of a state of `numel` elements."""
    return -(-numel // NUMEL) * NBYTES


def is_signed(rule: str, state: int) -> bool:
    """Whether the rule's state may be negative, and is kept as it is and not as its root."""
    return state == 0 if rule == "adam" else rule != "adagrad"


def table(signed: bool) -> Fp32:
    """What each of the 256 codes says of a scale, from the definition of the float."""
    bits = 3 if signed else 4
    values = []
    for code in range(256):
        exponent, fraction = divmod(code % 128 if signed else code, 1 << bits)
        part = fraction / (1 << bits)
        value = part * 2.0**-14 if exponent == 0 else (1 + part) * 2.0 ** (exponent - 15)
        values.append(-value if signed and code >= 128 else value)
    return np.array(values, np.float32)


def decode(blocks: Bytes, numel: int, signed: bool) -> Fp32:
    """The fp32 values of state blocks."""
    rows = blocks.reshape(-1, NBYTES)
    scales = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    with np.errstate(all="ignore"):
        values = (table(signed)[rows[:, 4:]] * scales).astype(np.float32)
        return (values if signed else values * values).reshape(-1)[:numel]


def encode(values: Fp32, signed: bool, random: Words | None = None) -> Bytes:
    """State blocks of fp32 values, rounded with `random` bits, or to nearest."""
    numel, bits = len(values), 3 if signed else 4
    dropped = 23 - bits
    padding = np.zeros(-numel % NUMEL, np.float32)
    kept = np.concatenate([values, padding])
    if random is None:
        added = np.full(len(kept), 1 << (dropped - 1), np.uint32)
    else:
        random = np.concatenate([random, np.zeros(len(padding), np.uint32)])
        added = random & u32((1 << dropped) - 16)
    with np.errstate(all="ignore"):
        if not signed:
            kept = np.sqrt(np.where(np.abs(kept) < np.finfo(np.float32).tiny, f32(0), kept))
        magnitude = kept.view(np.uint32) & u32(0x7FFFFFFF)
        largest = magnitude.reshape(-1, NUMEL).max(axis=1).view(np.float32)
        infinite = ~(largest < f32(2.0**126))
        zero = largest < f32(2.0**-109 if signed else 2.0**-63)
        scale = np.where(infinite, f32(np.nan), np.where(zero, f32(0), largest))
        inverse = np.where(infinite | zero, f32(0), f32(1) / scale * f32(1 + 2.0**-21))
        ratio = magnitude.view(np.float32) * np.repeat(inverse, NUMEL)
        ratio = np.where(ratio < 1, ratio, f32(1))
        small = ratio < f32(2.0**-14)
        shifted = np.where(small, ratio + f32(2.0**-14), ratio).astype(np.float32)
        offset = np.where(small, 113 << bits, 112 << bits).astype(np.uint32)
        codes = (shifted.view(np.uint32) + added >> u32(dropped)) - offset
        if signed:
            sign = kept.view(np.uint32) >> u32(24) & u32(0x80)
            codes |= np.where(codes == 0, u32(0), sign)
        else:
            # The first code whose value's square is a normal number.
            with_scale = np.outer(np.where(np.isnan(scale), 0, scale), table(False)[: ONE[False] + 1])
            first = (with_scale.astype(np.float64) > 2.0**-63).argmax(axis=1)
            first = np.where(with_scale[:, -1] <= 2.0**-63, ONE[False], first).astype(np.uint32)
            codes = np.where(kept > 0, np.maximum(codes, np.repeat(first, NUMEL)), codes)
    codes[np.repeat(infinite | zero, NUMEL)] = 0
    codes[numel:] = 0
    rows = np.empty((len(scale), NBYTES), np.uint8)
    scale[infinite] = np.uint32(0x7FC00000).view(np.float32)
    rows[:, :4] = scale.astype(np.float32).view(np.uint8).reshape(-1, 4)
    rows[:, 4:] = codes.astype(np.uint8).reshape(-1, NUMEL)
    return rows.reshape(-1)
