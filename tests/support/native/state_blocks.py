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
LAST = {True: 127, False: 255}  # of a NaN, if the block has any, and before it of an infinity


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
    codes = rows[:, 4:]
    with np.errstate(all="ignore"):
        values = (table(signed)[codes] * np.abs(scales)).astype(np.float32)
        others = np.signbit(scales)
        magnitude = codes & 0x7F if signed else codes
        infinity = np.where(signed & (codes >= 128), f32(-np.inf), f32(np.inf))
        values = np.where(others & (magnitude == LAST[signed] - 1), infinity, values)
        values = np.where(others & (magnitude == LAST[signed]), f32(np.nan), values)
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
            tiny = np.abs(kept) < np.finfo(np.float32).tiny
            kept = np.where(tiny, f32(0), np.sqrt(kept))
        magnitude = kept.view(np.uint32) & u32(0x7FFFFFFF)
        infinite = magnitude >= f32(2.0**126).view(np.uint32)
        others = infinite.reshape(-1, NUMEL).any(axis=1)
        numbers = np.where(infinite, u32(0), magnitude)
        largest = numbers.reshape(-1, NUMEL).max(axis=1).view(np.float32)
        zero = largest < f32(2.0**-109 if signed else 2.0**-63)
        scale = np.where(zero, f32(0), largest)
        inverse = np.where(zero, f32(0), f32(1) / scale * f32(1 + 2.0**-21))
        ratio = magnitude.view(np.float32) * np.repeat(inverse, NUMEL)
        small = ratio < f32(2.0**-14)
        shifted = np.where(small, ratio + f32(2.0**-14), ratio).astype(np.float32)
        offset = np.where(small, 113 << bits, 112 << bits).astype(np.uint32)
        codes = (shifted.view(np.uint32) + added >> u32(dropped)) - offset
        if not signed:
            # The first code whose value's square is a normal number.
            roots = np.outer(scale.astype(np.float64), table(False)[: ONE[False] + 1])
            first = (roots > 2.0**-63).argmax(axis=1)
            first = np.where((roots[:, -1] <= 2.0**-63) & ~zero, ONE[False], first)
            first = np.repeat(first.astype(np.uint32), NUMEL)
            codes = np.where(kept > 0, np.maximum(codes, first), codes)
        codes = np.where(infinite, u32(LAST[signed] - 1), codes)
        codes = np.where(np.isnan(kept), u32(LAST[signed]), codes)
        if signed:
            sign = kept.view(np.uint32) >> u32(24) & u32(0x80)
            codes |= np.where((codes == 0) | (codes == LAST[True]), u32(0), sign)
    codes[numel:] = 0
    rows = np.empty((len(scale), NBYTES), np.uint8)
    signs = others.astype(np.uint32) << u32(31)
    rows[:, :4] = (scale.view(np.uint32) | signs).view(np.uint8).reshape(-1, 4)
    rows[:, 4:] = codes.astype(np.uint8).reshape(-1, NUMEL)
    return rows.reshape(-1)
