"""native/state_codec: bf16 states are rounded at random, without bias, and reproducibly."""

import numpy as np
import pytest

from offload import _native
from tests.support.native.update_arrays import Arrays, equal_bits
from tests.support.native.update_oracle import Hyper, random_bits

ISAS = _native.isa_available()


def exp_avg_of(
    values: np.ndarray, kind: _native.UpdateKind, step: int = 1, index: int = 0
) -> np.ndarray:
    """The values as a first state that holds just them."""
    arrays = Arrays(kind, np.zeros(len(values), np.float32))
    hyper = Hyper(lr=0.0, beta1=0.0, beta2=0.0, momentum=0.9, step=step)
    arrays.step(values, hyper, index=index)
    return arrays.fp32_states()[0]


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("kind", "kept_bits"),
    [
        (_native.UpdateKind("fp32", "fp32", "adam", "bf16"), 16),
        (_native.UpdateKind("fp32", "fp32", "lion", "bf16"), 16),
        (_native.UpdateKind("bf16", "fp32", "lion", "bf16"), 15),
        (_native.UpdateKind("fp32", "fp32", "sgd", "bf16"), 16),
        (_native.UpdateKind("bf16", "fp32", "sgd", "bf16"), 15),
    ],
    ids=repr,
)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("base", [1.0, -1.5, 3e-38, -2e30])
def test_rounding_is_unbiased(
    kind: _native.UpdateKind, kept_bits: int, share: float, base: float
) -> None:
    """Goes away from zero as often as its dropped bits say. 5 standard deviations; nothing here is
    random from run to run."""
    numel, low = 200_000, 1 << (32 - kept_bits)
    word = int(np.float32(base).view(np.uint32)) & -low
    dropped = int(share * low)
    values = np.full(numel, word | dropped, np.uint32).view(np.float32)
    found = exp_avg_of(values, kind, step=3).view(np.uint32)
    ups = found == word + low
    assert (ups | (found == word)).all()
    p = dropped / low
    assert abs(ups.mean() - p) <= 5 * np.sqrt(p * (1 - p) / numel)


def test_the_two_states_of_an_element_use_different_bits() -> None:
    numel = 200_000
    bits = random_bits(1, 0, numel)
    first, second = (bits & 0xFFFF).astype(float), (bits >> 16).astype(float)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(numel)


def test_neighbours_and_steps_are_not_correlated() -> None:
    numel = 200_000
    here = random_bits(1, 0, numel)
    for other in (random_bits(1, 1, numel), random_bits(2, 0, numel), random_bits(1, numel, numel)):
        for shift in (0, 16):
            pair = [(bits >> np.uint32(shift) & 0xFFFF).astype(float) for bits in (here, other)]
            assert abs(np.corrcoef(*pair)[0, 1]) < 5 / np.sqrt(numel)
    # Every bit is set half of the time.
    for bit in range(32):
        ones = (here >> np.uint32(bit) & 1).mean()
        assert abs(ones - 0.5) < 5 * 0.5 / np.sqrt(numel)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", ["adam", "lion", "sgd"])
def test_special_values(isa: str, rule: str, dtype: str) -> None:
    _native.set_isa(isa)
    kind = _native.UpdateKind(dtype, "fp32", rule, "bf16")
    numel = 4096
    for value in (np.inf, -np.inf, 0.0, 1.0, -2.0, -(2.0**-126)):
        wanted = np.full(numel, value, np.float32)
        assert equal_bits(exp_avg_of(wanted, kind), wanted)
    # What is no normal number becomes 0 before it is rounded.
    subnormal = np.full(numel, -(2.0**-126) * (1 - 2.0**-23), np.float32)
    assert equal_bits(exp_avg_of(subnormal, kind), np.zeros(numel, np.float32))
    state_kinds = np.random.default_rng(0).integers(0x7F800001, 1 << 31, numel, np.uint32)
    state_kinds[:2] = 0x7F800001, 0x7FFFFFFF
    for nans in (state_kinds, state_kinds | np.uint32(1 << 31)):
        assert np.isnan(exp_avg_of(nans.view(np.float32), kind)).all()
    # Beyond the largest bf16 a value may become infinite; the largest itself may not.
    largest = np.full(numel, 0x7F7E0000, np.uint32).view(np.float32)
    assert equal_bits(exp_avg_of(largest, kind), largest)
    beyond = exp_avg_of(np.full(numel, 0x7F7FC000, np.uint32).view(np.float32), kind)
    assert 0.6 < np.isinf(beyond).mean() < 0.9


def test_bits_depend_on_step_and_number_only() -> None:
    kind = _native.UpdateKind("fp32", "fp32", "adam", "bf16")
    values = np.full(1000, 1.001, np.float32)
    wanted = exp_avg_of(values, kind, index=123)
    assert equal_bits(exp_avg_of(values, kind, index=123), wanted)
    assert equal_bits(exp_avg_of(values, kind, index=123 + (1 << 32)), wanted)
    assert equal_bits(exp_avg_of(values[10:], kind, index=133), wanted[10:])
    assert not equal_bits(exp_avg_of(values, kind, index=124), wanted)
    assert not equal_bits(exp_avg_of(values, kind, step=2, index=123), wanted)


def test_a_bf16_average_follows_what_nearest_rounding_would_lose() -> None:
    """exp_avg moves by less than half a unit of bf16 a step: rounded to nearest it would stay at 0
    once it is near; rounded at random its expectation follows the exact average."""
    numel, steps, beta = 20_000, 200, 0.999
    kind = _native.UpdateKind("fp32", "fp32", "adam", "bf16")
    arrays = Arrays(kind, np.zeros(numel, np.float32))
    grad = np.ones(numel, np.float32)
    for step in range(1, steps + 1):
        arrays.step(grad, Hyper(lr=0.0, beta1=beta, step=step))
    exact = 1 - beta**steps
    found = arrays.fp32_states()[0].astype(np.float64)
    # Each step adds an error of at most a unit (2^-8 relative) with mean 0.
    spread = np.sqrt(steps) * exact * 2.0**-8
    assert abs(found.mean() - exact) < 5 * spread / np.sqrt(numel)
