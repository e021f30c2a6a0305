"""native/state_codec: bf16 states are rounded at random, without bias.

test_update.py compares their bits with the oracle's, whose random bits have tests here.
"""

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


@pytest.mark.covering(1)
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
@pytest.mark.parametrize("share", [0.1, 0.9])
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


def test_bits_belong_to_elements_and_not_to_the_blocks_of_threads() -> None:
    """An update of three blocks, and of smaller arrays."""
    kind, numel = _native.UpdateKind("fp32", "fp32", "lion", "bf16"), 3 * 64 * 1024
    values = np.full(numel, 1 + 2.0**-9, np.float32)
    parts = [exp_avg_of(values[i : i + 50_000], kind, index=7 + i) for i in range(0, numel, 50_000)]
    assert equal_bits(exp_avg_of(values, kind, index=7), np.concatenate(parts))


@pytest.mark.covering(1)
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
