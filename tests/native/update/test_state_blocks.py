"""native/state_block: states in 8 bits against their definition, bit for bit."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offload import _native
from tests.support.native import state_blocks
from tests.support.native.update_arrays import Arrays, equal_bits
from tests.support.native.update_oracle import Hyper

ISAS = _native.isa_available()
SIGNED = _native.UpdateKind("fp32", "fp32", "lion", "8bit")
ROOTS = _native.UpdateKind("fp32", "fp32", "adagrad", "8bit")
TINY = float(np.finfo(np.float32).tiny)


def encoded(kind: _native.UpdateKind, values: np.ndarray, state: int = 0) -> np.ndarray:
    blocks = np.zeros(state_blocks.state_bytes(len(values)), np.uint8)
    _native.encode_state(kind, state, values.ctypes.data, blocks.ctypes.data, len(values))
    return blocks


def decoded(kind: _native.UpdateKind, blocks: np.ndarray, numel: int, state: int = 0) -> np.ndarray:
    values = np.full(numel, 7, np.float32)
    _native.decode_state(kind, state, blocks.ctypes.data, values.ctypes.data, numel)
    return values


def blocks_of(scale: float, codes: np.ndarray) -> np.ndarray:
    """State blocks with one scale."""
    rows = np.zeros((codes.size // 64, 68), np.uint8)
    rows[:, :4] = np.array([scale], np.float32).view(np.uint8)
    rows[:, 4:] = codes.reshape(-1, 64)
    return rows.reshape(-1)


def test_every_code_is_the_float_that_it_is_defined_to_be() -> None:
    for kind, isa in itertools.product((SIGNED, ROOTS), ISAS):
        _native.set_isa(isa)
        signed = kind is SIGNED
        found = decoded(kind, blocks_of(3.0, np.arange(256, dtype=np.uint8)), 256)
        wanted = np.float32(3) * state_blocks.table(signed)
        assert equal_bits(found, wanted if signed else wanted * wanted), isa
        assert state_blocks.table(signed)[state_blocks.ONE[signed]] == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [SIGNED, ROOTS], ids=["signed", "roots"])
@pytest.mark.parametrize("scale", [1.0, 3.1415927, 1e-9, 2.0**-40, 7e17])
def test_every_number_that_is_decoded_becomes_its_code_again(
    kind: _native.UpdateKind, isa: str, scale: float
) -> None:
    """Also in an update, whose rounding is random."""
    _native.set_isa(isa)
    one = state_blocks.ONE[kind is SIGNED]
    codes = np.arange(one + 1, dtype=np.uint8)
    if kind is SIGNED:
        codes = np.concatenate([codes, 128 + codes[1:]])
    # Each block has the code of 1, or its scale would be another one.
    codes = np.concatenate([codes, np.zeros(-len(codes) % 63, np.uint8)]).reshape(-1, 63)
    codes = np.concatenate([np.full((len(codes), 1), one, np.uint8), codes], axis=1)
    blocks = blocks_of(scale, codes)
    values = decoded(kind, blocks, codes.size)
    assert equal_bits(encoded(kind, values), blocks)
    same = _native.UpdateKind("fp32", "fp32", "sgd" if kind is SIGNED else "adagrad", "8bit")
    arrays = Arrays(same, np.zeros(codes.size, np.float32))
    arrays.states[0][:] = blocks
    for step in range(1, 40):
        arrays.step(np.zeros(codes.size, np.uint32), Hyper(lr=0.0, step=step), index=step)
        assert equal_bits(arrays.states[0], blocks)


def many_values(numel: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    special = [0.0, -0.0, 1e-45, TINY, 2.0**-109, 2.0**-63, 2.0**126, np.inf, -np.inf, np.nan]
    ordinary = st.floats(-1, 1, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32)
    element = ordinary | st.floats(width=32) | st.sampled_from(special)
    return hnp.arrays(np.float32, numel, elements=element)


@given(values=many_values(st.integers(0, 200)))
def test_blocks_have_the_documented_bits(values: np.ndarray) -> None:
    for kind, isa in itertools.product((SIGNED, ROOTS), ISAS):
        _native.set_isa(isa)
        signed = kind is SIGNED
        of = values if signed else np.abs(values)
        blocks = encoded(kind, of)
        assert equal_bits(blocks, state_blocks.encode(of, signed))
        found = decoded(kind, blocks, len(of))
        assert np.array_equal(found, state_blocks.decode(blocks, len(of), signed), equal_nan=True)
        assert equal_bits(encoded(kind, found), blocks)  # as state_dict() and back
        number = np.isfinite(of)
        assert np.array_equal(np.isnan(found), np.isnan(of))
        assert not (found[number] == 0)[(of[number] >= TINY)].any() or signed
        assert (np.abs(found[number & (found != 0)]) >= TINY).all()
        assert not np.signbit(found[found == 0]).any()


@pytest.mark.parametrize("kind", [SIGNED, ROOTS], ids=["signed", "roots"])
def test_a_state_is_rounded_to_the_nearest_code(kind: _native.UpdateKind) -> None:
    signed = kind is SIGNED
    random = np.random.default_rng(0)
    values = (random.standard_normal(64_000) * 10.0 ** random.uniform(-6, 0, 64_000)).astype("f4")
    values = values if signed else np.abs(values)
    rows = encoded(kind, values).reshape(-1, 68)
    scales = np.ascontiguousarray(rows[:, :4]).view(np.float32).astype(np.float64)
    found = state_blocks.table(signed)[rows[:, 4:]]
    ratios = (values if signed else np.sqrt(values)).reshape(-1, 64) / scales
    grid = np.unique(state_blocks.table(signed)[state_blocks.table(signed) <= 1])
    above = np.searchsorted(grid, ratios).clip(1, len(grid) - 1)
    best = np.minimum(np.abs(grid[above] - ratios), np.abs(grid[above - 1] - ratios))
    excess = np.abs(found - ratios) - best
    clear = excess > 2.0**-20 * np.abs(ratios) + 2.0**-30
    # A root above zero is not rounded to zero.
    assert not (clear & (signed | (found > 2.0**-18))).any()
    assert (rows[:, 4:].max(axis=1) > 0).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("code", [3, 50, 99])
def test_rounding_is_unbiased(signed: bool, share: float, code: int) -> None:
    """5 standard deviations; nothing here is random from run to run."""
    kind = SIGNED if signed else ROOTS
    low, high = (float(state_blocks.table(signed)[c]) for c in (code, code + 1))
    value = low + share * (high - low)
    numel = 64 * 3000
    arrays = Arrays(kind, np.zeros(numel, np.float32))
    grad = np.full(numel, value, np.float32)
    grad[::64] = 1  # which is the scale
    arrays.step(grad.view(np.uint32), Hyper(lr=0.0, beta1=0.0, beta2=0.0, step=3))
    codes = arrays.states[0].reshape(-1, 68)[:, 5:]
    assert set(np.unique(codes)) == {code, code + 1}
    count = codes.size
    assert abs((codes > code).mean() - share) <= 5 * np.sqrt(share * (1 - share) / count) + 1e-4


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_beside_a_parameter_is_no_part_of_its_last_block(isa: str) -> None:
    """Elements behind it neither change nor give it a scale."""
    _native.set_isa(isa)
    for rest in (1, 5, 17, 63):
        numel = 64 + rest
        values = np.linspace(-0.5, 0.5, 128, dtype=np.float32)
        values[numel:] = 1e9
        kind = _native.UpdateKind("bf16", "fp32", "adam", "8bit")
        arrays, alone = Arrays(kind, values), Arrays(kind, values[:numel].copy())
        for state in arrays.states:
            state[68 + 4 + rest :] = 77
        for step in (1, 2):
            arrays.step(values.view(np.uint32), Hyper(step=step), 0, numel)
            alone.step(values[:numel].copy().view(np.uint32), Hyper(step=step))
        for state, wanted in zip(arrays.states, alone.states, strict=True):
            assert equal_bits(state[: 68 + 4 + rest], wanted[: 68 + 4 + rest])
            assert (state[68 + 4 + rest :] == 77).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_small_square_beside_large_ones_does_not_become_zero(isa: str) -> None:
    """The average of squares would round to 0 where that of gradients does not, and a step of lr
    would become one without bounds."""
    _native.set_isa(isa)
    kind = _native.UpdateKind("fp32", "fp32", "adam", "8bit")
    arrays = Arrays(kind, np.zeros(128, np.float32))
    grad = np.logspace(-12, 3, 128).astype(np.float32)
    for step in range(1, 30):
        arrays.step(grad.view(np.uint32), Hyper(lr=1e-3, eps=1e-30, step=step))
        exp_avg, exp_avg_sq = arrays.fp32_states()
        assert (exp_avg_sq > 0).all()
        # Of a constant gradient it is up to 5.5; the smallest codes are steps of twice their value.
        assert (np.abs(exp_avg) <= 3 * 5.5 * np.sqrt(exp_avg_sq)).all()
    assert np.abs(arrays.fp32_master()).max() < 3 * 30 * 1e-3


def test_unused_rows_end_at_zero() -> None:
    """States shrink with every step, and with them their scale, until it is 0."""
    arrays = Arrays(SIGNED, np.zeros(64, np.float32))
    grad = np.full(64, 1e-30, np.float32)
    arrays.step(grad.view(np.uint32), Hyper(lr=0.0, beta2=0.9))
    for step in range(2, 200):
        arrays.step(np.zeros(64, np.uint32), Hyper(lr=0.0, beta2=0.9, step=step))
        (state,) = arrays.fp32_states()
        assert ((state == 0) | (state >= TINY)).all()
    assert not arrays.states[0].any()


def test_only_states_in_8_bits_have_blocks() -> None:
    with pytest.raises(ValueError, match="state 0 of the kind, whose states are bf16"):
        _native.encode_state(_native.UpdateKind("fp32", "fp32", "lion", "bf16"), 0, 0, 0, 0)
    with pytest.raises(ValueError, match="state 1 of the kind, whose states are 8bit"):
        _native.decode_state(SIGNED, 1, 0, 0, 0)
