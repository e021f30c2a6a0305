"""native/split_master: the fp32 master survives as bf16, remainder and carry, for every carrier."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offload import _native
from tests.support.native.update_arrays import Arrays, equal_bits, to_dtype, to_fp32
from tests.support.native.update_oracle import Hyper, split, without_tie

ISAS = _native.isa_available()
NUMBERS = [0, 1, 0x80000000, 0x007FFFFF, 0x7F7FFFFF]
SPECIAL = [*NUMBERS, 0x7F800000, 0xFF800000, 0x7F800001, 0x7F810000, 0xFFFFFFFF]
RULES = ("adam", "lion", "adagrad", "sgd", "muon")
BF16_KINDS = [
    _native.UpdateKind("bf16", "bf16", rule, state_dtype)
    for rule, state_dtype in itertools.product(RULES, ("fp32", "bf16"))
]
EIGHT_BIT = _native.UpdateKind("bf16", "bf16", "adam", "8bit")  # which has no bit for the carry


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_param_is_torchs_rounding_of_the_master(isa: str, dtype: str) -> None:
    _native.set_isa(isa)
    random = np.random.default_rng(3)
    anything = random.integers(0, 1 << 32, 100_000, dtype=np.uint32)
    # All ties of either type, and their neighbours.
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    half_ties = np.arange(0x38000000, 0x48000000, 0x1000, dtype=np.uint32)
    tiny_ties = np.arange(0x33000000, 0x38800000, 0x1000, dtype=np.uint32)
    near = np.concatenate([ties, half_ties, tiny_ties])
    master = np.concatenate([anything, near - 1, near, near + 1]).view(np.float32)
    arrays = Arrays(_native.UpdateKind(dtype, "fp32"), master)
    if dtype == "fp16":
        arrays.step(np.zeros(len(master), np.float32), Hyper(lr=0.0))  # w stays
    wanted = to_dtype(master, dtype)
    number = ~np.isnan(master)
    assert equal_bits(arrays.param[number], wanted[number])
    assert np.isnan(to_fp32(arrays.param[~number], dtype)).all()


def words(numel: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    tie = st.integers(0, 0xFFFF).map(lambda upper: upper << 16 | 0x8000)
    any_word = st.integers(0, (1 << 32) - 1)
    return hnp.arrays(np.uint32, numel, elements=any_word | tie | st.sampled_from(SPECIAL))


@given(bits=words(st.integers(0, 50)), kept=words(st.just(50)))
def test_split_and_join_are_exact(bits: np.ndarray, kept: np.ndarray) -> None:
    for kind, isa in itertools.product(BF16_KINDS, ISAS):  # making examples takes longest
        _native.set_isa(isa)
        check_split_and_join(kind, bits, kept)


def check_split_and_join(kind: _native.UpdateKind, bits: np.ndarray, kept: np.ndarray) -> None:
    master, numel = bits.view(np.float32), len(bits)
    if kind.state_dtype == "bf16":
        kept = (kept >> 16).astype(np.uint16)
    param, remainder = np.zeros(numel, np.uint16), np.zeros(numel, np.uint16)
    carrier, target = kept.copy(), np.zeros(numel, np.float32)
    _native.split_master(
        kind,
        master.ctypes.data,
        param.ctypes.data,
        remainder.ctypes.data,
        carrier.ctypes.data,
        numel,
    )
    wanted_param, wanted_remainder, carry = split(master)
    assert equal_bits(param, wanted_param)
    assert equal_bits(remainder, wanted_remainder)
    bit = 0 if kind.carrier == "lowest" else 8 * kept.itemsize - 1
    mask = kept.dtype.type(1 << bit)
    wanted = (kept[:numel] & ~mask) | (carry.astype(kept.dtype) << kept.dtype.type(bit))
    nan = np.isnan(to_fp32(kept[:numel], kind.state_dtype))
    assert equal_bits(carrier[:numel][~nan], wanted[~nan])
    assert equal_bits(carrier[:numel] & mask, wanted & mask)
    assert np.isnan(to_fp32(carrier[:numel][nan] & ~mask, kind.state_dtype)).all()
    assert equal_bits(carrier[numel:], kept[numel:])
    _native.join_master(
        kind,
        param.ctypes.data,
        remainder.ctypes.data,
        carrier.ctypes.data,
        target.ctypes.data,
        numel,
    )
    number = ~np.isnan(master)
    assert equal_bits(target[number], master[number])
    assert np.isnan(target[~number]).all()


@given(bits=words(st.integers(0, 50)))
def test_masters_on_a_tie_are_moved_by_a_unit_where_there_is_no_carry(bits: np.ndarray) -> None:
    """All others are kept exactly, and the parameter is the rounding of the master that is kept."""
    master = bits.view(np.float32)
    wanted = without_tie(master)
    for isa in ISAS:
        _native.set_isa(isa)
        arrays = Arrays(EIGHT_BIT, master)
        number = ~np.isnan(master)
        found = arrays.fp32_master()
        assert equal_bits(found[number], wanted[number])
        assert np.isnan(found[~number]).all()
        assert equal_bits(arrays.param[number], to_dtype(master, "bf16")[number])
        assert equal_bits(arrays.param[number], to_dtype(found, "bf16")[number])
        again = Arrays(EIGHT_BIT, found)
        assert equal_bits(again.fp32_master()[number], found[number])


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [*BF16_KINDS, EIGHT_BIT], ids=repr)
def test_an_update_with_rate_zero_keeps_every_master(kind: _native.UpdateKind, isa: str) -> None:
    """The carry is written with the new state whatever the state is."""
    _native.set_isa(isa)
    ties = (np.arange(0x7F80, dtype=np.uint32) << 16) | 0x8000
    master = np.concatenate([ties - 1, ties, ties + 1]).view(np.float32)
    arrays = Arrays(kind, master)
    master = without_tie(master) if kind is EIGHT_BIT else master
    grad = to_dtype(np.random.default_rng(1).standard_normal(len(master)), "bf16")
    for step in range(1, 5):
        arrays.step(grad, Hyper(lr=0.0, momentum=0.9, step=step))
        assert equal_bits(arrays.fp32_master(), master)
        assert arrays.fp32_states()[-1].any() or kind.rule == "muon"  # which has another pass


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [*BF16_KINDS, EIGHT_BIT], ids=repr)
def test_a_parameter_that_is_written_alone_stays_what_was_written(
    kind: _native.UpdateKind, isa: str
) -> None:
    """Whatever master it had: the new one is less than a bf16 step from the parameter, which is its
    rounding, so an update that moves nothing keeps it: zeros stay zero, infinities infinite."""
    _native.set_isa(isa)
    every = np.arange(1 << 16, dtype=np.uint16)
    number = every[((every & 0x7F80) != 0x7F80) | ((every & 0x7F) == 0)]
    for remainder in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        for upper in (0x3F80, 0x3F81):  # rounding decides on the carry of 0x8000
            before = np.full(len(number), upper << 16 | remainder, np.uint32).view(np.float32)
            arrays = Arrays(kind, before)
            arrays.param[:] = number
            master = arrays.fp32_master()
            assert equal_bits(to_dtype(master, "bf16"), number)
            steps = (master.view(np.uint32) >> 16).astype(np.int64) - number
            assert set(steps.tolist()) <= {0, -1}


def test_only_bf16_is_split() -> None:
    for dtype in ("fp32", "fp16"):
        kind = _native.UpdateKind(dtype, "fp32")
        with pytest.raises(ValueError, match=f"dtype is {dtype}"):
            _native.split_master(kind, 0, 0, 0, 0, 0)
        with pytest.raises(ValueError, match=f"dtype is {dtype}"):
            _native.join_master(kind, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="carrier is 0"):
        _native.split_master(BF16_KINDS[0], 64, 64, 64, 0, 1)
    with pytest.raises(ValueError, match="carrier is not 0"):
        _native.split_master(EIGHT_BIT, 64, 64, 64, 64, 1)
