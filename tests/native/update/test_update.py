"""native/update: every kind of update against the oracle, bit for bit, and against torch."""

import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _native
from tests.support.native.update_arrays import (
    Arrays,
    equal_bits,
    gradients,
    masters,
    to_dtype,
    to_fp32,
    unaligned,
)
from tests.support.native.update_oracle import Hyper, fma, stored, update, without_tie

DTYPES = ["fp32", "bf16", "fp16"]
STATE_DTYPES = ["fp32", "bf16", "8bit"]
ISAS = _native.isa_available()
BLOCK = 64 * 1024  # what a worker takes at a time
HYPERS = {
    "adam": {
        "plain": Hyper(lr=1e-2, grad_scale=0.3),
        "coupled": Hyper(lr=1e-2, weight_decay=0.1),
        "decoupled": Hyper(lr=1e-2, weight_decay=0.1, decoupled=True, grad_scale=0.3),
        "uncorrected": Hyper(beta1=0.8, weight_decay=0.1, decoupled=True, bias_correction=False),
    },
    "lion": {
        "plain": Hyper(lr=1e-3, beta2=0.99, grad_scale=0.3),
        "decoupled": Hyper(lr=1e-3, beta1=0.95, beta2=0.98, weight_decay=0.3, decoupled=True),
    },
    "adagrad": {
        "plain": Hyper(lr=1e-2, eps=1e-10, grad_scale=0.3),
        "coupled": Hyper(lr=1e-2, eps=1e-10, weight_decay=0.1, lr_decay=0.05),
    },
    "sgd": {
        "plain": Hyper(lr=1e-2, weight_decay=0.1, grad_scale=0.3),
        "nesterov": Hyper(lr=1e-2, momentum=0.9, nesterov=True),
        "damped": Hyper(lr=1e-2, weight_decay=0.1, momentum=0.8, dampening=0.3, grad_scale=0.3),
    },
    "muon": {  # its first pass is in test_muon_momentum.py
        "plain": Hyper(lr=1e-2),
        "decoupled": Hyper(lr=1e-2, weight_decay=0.1, decoupled=True, lr_scale=1.7),
    },
}
KINDS = [
    _native.UpdateKind(*names) for names in itertools.product(DTYPES, DTYPES, HYPERS, STATE_DTYPES)
]


def some_hyper(kind: _native.UpdateKind) -> Hyper:
    return list(HYPERS[kind.rule].values())[-1]


def kept_master(w: np.ndarray, kind: _native.UpdateKind) -> np.ndarray:
    return without_tie(w) if kind.carrier == "remainder" else w


@pytest.mark.covering(3)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", HYPERS)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_the_oracles(rule: str, dtype: str, grad_dtype: str, state_dtype: str) -> None:
    """On every instruction set, of which the oracle knows nothing."""
    kind = _native.UpdateKind(dtype, grad_dtype, rule, state_dtype)
    lengths = [(0, 0), (1, 1), (15, 2), (16, 0), (1003, 3)]
    for hyper, (numel, offset) in itertools.product(HYPERS[rule].values(), lengths):
        index = (1 << 32) - 500  # numbers are taken modulo 2^32
        w = kept_master(masters(numel), kind)
        states = tuple(np.zeros_like(w) for _ in range(kind.states))
        on_isas = {isa: Arrays(kind, w, offset) for isa in ISAS}
        for step in range(1, 4):
            grad = unaligned(gradients(numel, grad_dtype, seed=step), offset)
            now = dataclasses.replace(hyper, step=step)
            w, states = update(rule, w, states, to_fp32(grad, grad_dtype), now)
            states = stored(rule, dtype, state_dtype, states, step, index)
            w = kept_master(w, kind)
            for isa, arrays in on_isas.items():
                _native.set_isa(isa)
                arrays.step(grad, now, index=index)
                assert equal_bits(arrays.fp32_master(), w), isa
                for found, wanted in zip(arrays.fp32_states(), states, strict=True):
                    assert equal_bits(found, wanted), isa
                assert equal_bits(arrays.param, to_dtype(w, dtype)), isa


@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    numel=st.integers(1, 2 * BLOCK + 77),
    offset=st.integers(0, 7),
    index=st.integers(0, 1 << 40),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_bits_do_not_depend_on_isa_threads_or_cuts(
    kind: _native.UpdateKind,
    numel: int,
    offset: int,
    index: int,
    isa: str,
    threads: int,
    data: st.DataObject,
) -> None:
    grads = [gradients(numel, kind.grad_dtype, seed) for seed in range(2)]

    def train(cuts: list[int]) -> bytes:
        arrays = Arrays(kind, masters(numel), offset)
        for step, grad in enumerate(grads, start=1):
            now = dataclasses.replace(some_hyper(kind), step=step)
            for begin, end in itertools.pairwise([0, *sorted(cuts), numel]):
                arrays.step(grad, now, begin, end, index)
        return arrays.bytes()

    _native.set_isa("scalar")
    _native.set_threads(1)
    wanted = train([])
    _native.set_isa(isa)
    _native.set_threads(threads)
    of = 64 if kind.state_dtype == "8bit" else 1  # cuts are where state blocks begin
    cuts = data.draw(st.lists(st.integers(0, numel // of), max_size=4))
    assert train([of * cut for cut in cuts]) == wanted


@pytest.mark.covering(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", HYPERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_too_small_to_be_normal_become_zero(
    dtype: str, rule: str, state_dtype: str, isa: str
) -> None:
    """As those of rows that are not used: they shrink with every step, and cost as long as the
    processor computes with subnormal numbers."""
    kind = _native.UpdateKind(dtype, "fp32", rule, state_dtype)
    _native.set_isa(isa)
    numel, tiny = 1003, np.finfo(np.float32).tiny
    arrays, w = Arrays(kind, masters(numel)), masters(numel)
    random = np.random.default_rng(0)
    for i, state in enumerate(arrays.states):
        values = (random.uniform(0.0, 3.0, numel) * tiny).astype(np.float32)
        if i < len(arrays.states) - 1 or kind.rule not in ("adam", "adagrad"):
            values *= random.choice(np.float32([-1, 1]), numel)
        state[:] = values.view(np.uint32) >> (16 if kind.state_dtype == "bf16" else 0)
    if arrays.master is not None and kind.dtype == "bf16":
        arrays.split(w)
    states = arrays.fp32_states()
    for step in range(5000, 5003):
        grad = np.zeros(numel, np.float32)
        now = dataclasses.replace(some_hyper(kind), step=step, grad_scale=1.0, weight_decay=0.0)
        arrays.step(grad.view(np.uint32), now)
        w, states = update(kind.rule, w, states, grad, now)
        states = stored(kind.rule, kind.dtype, kind.state_dtype, states, step)
        assert equal_bits(arrays.fp32_master(), w)
        for found, wanted in zip(arrays.fp32_states(), states, strict=True):
            assert equal_bits(found, wanted)
            zero = found == 0
            assert (zero | (np.abs(found) >= tiny)).all()
            assert 0 < zero.sum() < numel
            assert not np.signbit(found[zero]).any()


def test_every_half_precision_gradient_is_converted_exactly() -> None:
    for dtype, isa in itertools.product(("bf16", "fp16"), ISAS):
        _native.set_isa(isa)
        grad = np.arange(1 << 16, dtype=np.uint16)
        arrays = Arrays(_native.UpdateKind("fp32", dtype), np.zeros(len(grad), np.float32))
        # exp_avg = 1 * (scale * g) + 0; scaled, or a subnormal's would become 0.
        arrays.step(grad, Hyper(lr=0.0, beta1=0.0, grad_scale=2.0**16))
        exp_avg = arrays.fp32_states()[0]
        with np.errstate(over="ignore", invalid="ignore"):
            values = to_fp32(grad, dtype) * np.float32(2.0**16)
        values[values == 0] = 0  # -0 + 0 = 0
        number = ~np.isnan(values)
        assert equal_bits(exp_avg[number], values[number]), isa
        assert np.isnan(exp_avg[~number]).all(), isa


def test_lion_takes_the_sign_and_nothing_else() -> None:
    grad = np.float32([0.0, -0.0, 1e-45, -1e-45, 3e38, -np.inf, np.inf, np.nan] * 5)
    for zero, isa in itertools.product((0.0, -0.0), ISAS):
        _native.set_isa(isa)
        arrays = Arrays(_native.UpdateKind("fp32", "fp32", "lion"), np.full(40, zero, np.float32))
        # 0.5 * 1e-45 is not 0: it rounds to even, which is 0; so beta1 = 0.
        arrays.step(grad.view(np.uint32), Hyper(lr=0.25, beta1=0.0))
        wanted = np.float32([zero, zero, -0.25, 0.25, -0.25, 0.25, -0.25, np.nan] * 5)
        number = ~np.isnan(wanted)
        # w - 0.25 * sign: adding -0 to a zero keeps its sign.
        assert equal_bits(arrays.fp32_master()[number], wanted[number])
        assert np.isnan(arrays.fp32_master()[~number]).all()


@pytest.mark.covering(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", HYPERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_gradients_spread_no_further_than_their_element(
    dtype: str, rule: str, state_dtype: str, isa: str
) -> None:
    kind = _native.UpdateKind(dtype, "fp32", rule, state_dtype)
    _native.set_isa(isa)
    grad = np.ones(40, np.float32)
    grad[3], grad[17], grad[39] = np.inf, np.nan, -np.inf
    arrays = Arrays(kind, masters(40))
    hyper = dataclasses.replace(some_hyper(kind), weight_decay=0.0)
    for step in (1, 2):
        arrays.step(grad.view(np.uint32), dataclasses.replace(hyper, step=step))
    poisoned = ~np.isfinite(arrays.fp32_master())
    # lion moves by the sign of an infinity, which is finite.
    assert poisoned.nonzero()[0].tolist() == ([17] if kind.rule == "lion" else [3, 17, 39])
    param = to_fp32(arrays.param, kind.dtype)
    assert equal_bits(np.isnan(param), np.isnan(arrays.fp32_master()))
    assert not np.isfinite(param[poisoned]).any()
    for state in [] if kind.rule == "muon" else arrays.fp32_states():
        assert (~np.isfinite(state)).nonzero()[0].tolist() == [3, 17, 39]
        assert np.isnan(state[17])


def test_subnormals_survive_the_callers_flush_to_zero() -> None:
    grad = np.full(1000, 1e-42, np.float32)
    arrays = Arrays(_native.UpdateKind("fp32", "fp32"), np.zeros(1000, np.float32))
    torch.set_flush_denormal(True)
    try:
        arrays.step(grad, Hyper(beta1=0.0, lr=0.0, grad_scale=2.0**20))
    finally:
        torch.set_flush_denormal(False)
    assert equal_bits(arrays.fp32_states()[0], grad * np.float32(2.0**20))


TORCH_RULES = {
    "adam": (torch.optim.Adam, {"weight_decay": 0.01}, Hyper(weight_decay=0.01)),
    "adamw": (
        torch.optim.AdamW,
        {"weight_decay": 0.01},
        Hyper(weight_decay=0.01, decoupled=True),
    ),
    "adagrad": (
        torch.optim.Adagrad,
        {"weight_decay": 0.01, "lr_decay": 0.1, "eps": 1e-8},
        Hyper(weight_decay=0.01, lr_decay=0.1),
    ),
}
SGD_OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "growing": {"momentum": 1.25, "dampening": -0.5},
}


@pytest.mark.parametrize("name", TORCH_RULES)
def test_agrees_with_torch(name: str) -> None:
    """Each of the ten updates, of about lr, may round differently by a unit in the last place."""
    numel, lr = 20_000, 1e-3
    w = masters(numel)
    param = torch.nn.Parameter(torch.from_numpy(w.copy()))
    cls, options, hyper = TORCH_RULES[name]
    reference = cls([param], lr=lr, **options)
    rule = name.removesuffix("w")
    arrays = Arrays(_native.UpdateKind("fp32", "fp32", rule), w)
    for step in range(1, 11):
        grad = np.random.default_rng(step).standard_normal(numel).astype(np.float32)
        param.grad = torch.from_numpy(grad)
        reference.step()
        arrays.step(grad, dataclasses.replace(hyper, lr=lr, step=step))
    theirs = param.detach().numpy()
    ulp = np.spacing(np.maximum(np.abs(w), np.float32(10 * lr)))
    distance = np.abs(arrays.fp32_master() - theirs) / ulp
    assert distance.max() <= 10
    assert distance.mean() < 0.5


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("options", SGD_OPTIONS.values(), ids=SGD_OPTIONS)
def test_sgd_has_torchs_bits(options: dict[str, float], isa: str) -> None:
    """torch fuses the same products and sums, where it computes with vectors."""
    _native.set_isa(isa)
    numel, lr = 20_480, 1e-2
    w = masters(numel)
    param = torch.nn.Parameter(torch.from_numpy(w.copy()))
    reference = torch.optim.SGD([param], lr=lr, **options)
    arrays = Arrays(_native.UpdateKind("fp32", "fp32", "sgd"), w)
    for step in range(1, 6):
        grad = np.random.default_rng(step).standard_normal(numel).astype(np.float32)
        param.grad = torch.from_numpy(grad)
        reference.step()
        arrays.step(grad, Hyper(lr=lr, step=step, **options))
        assert equal_bits(arrays.fp32_master(), param.detach().numpy())
    if "momentum" in options:
        assert equal_bits(arrays.states[0], reference.state[param]["momentum_buffer"].numpy())
    else:
        assert not arrays.states[0].any()


def test_lion_agrees_with_its_paper() -> None:
    """Algorithm 2 of the paper in double. Signs differ only where c is a rounding error from 0."""
    numel, lr, decay, beta1, beta2 = 20_000, 1e-3, 0.1, 0.9, 0.99
    w = masters(numel)
    exact, momentum = w.astype(np.float64), np.zeros(numel)
    near_zero = np.zeros(numel, bool)
    arrays = Arrays(_native.UpdateKind("fp32", "fp32", "lion"), w)
    for step in range(1, 11):
        grad = np.random.default_rng(step).standard_normal(numel).astype(np.float32)
        arrays.step(
            grad,
            Hyper(lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, decoupled=True, step=step),
        )
        c = beta1 * momentum + (1 - beta1) * grad
        near_zero |= np.abs(c) < 1e-6
        exact -= lr * (np.sign(c) + decay * exact)
        momentum = beta2 * momentum + (1 - beta2) * grad
    assert near_zero.mean() < 1e-3
    ulp = np.spacing(np.maximum(np.abs(w), np.float32(10 * lr)))
    distance = np.abs(arrays.fp32_master() - exact)[~near_zero] / ulp[~near_zero]
    assert distance.max() <= 20  # two roundings in each of ten updates


def test_fma_of_the_oracle_rounds_once() -> None:
    """Against exact rational arithmetic."""
    random = np.random.default_rng(0)
    a, b, c = random.integers(0, 1 << 32, (3, 3000), dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        c[::2] = (-a * b * (1 + random.standard_normal(3000) * 1e-7)).astype(np.float32)[::2]
        results = fma(a, b, c)
    for x, y, z, result in zip(*(array.tolist() for array in (a, b, c)), results, strict=True):
        if not (np.isfinite([x, y, z]).all() and np.isfinite(result)):
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        error = abs(Fraction(float(result)) - exact)
        for neighbour in np.nextafter(result, np.float32([-np.inf, np.inf])):
            if np.isfinite(neighbour):
                assert error <= abs(Fraction(float(neighbour)) - exact)


def test_kinds() -> None:
    kind = _native.UpdateKind("bf16", "fp32", rule="lion", state_dtype="bf16")
    assert (kind.dtype, kind.grad_dtype, kind.rule, kind.state_dtype) == (
        "bf16",
        "fp32",
        "lion",
        "bf16",
    )
    assert repr(kind) == (
        "UpdateKind(dtype='bf16', grad_dtype='fp32', rule='lion', state_dtype='bf16')"
    )
    assert _native.UpdateKind("bf16", "bf16") == _native.UpdateKind("bf16", "bf16", "adam", "fp32")
    assert len(set(KINDS)) == len(KINDS) == len({hash(k) for k in KINDS})
    assert kind != "lion"
    with pytest.raises(AttributeError):
        kind.rule = "adam"  # type: ignore[misc]
    assert repr(_native.UpdateKind("fp32", "fp32", state_dtype="8bit")).endswith("'8bit')")
    sizes = {
        ("bf16", "bf16", "adam", "8bit"): (4.125, 14.25),
        ("fp32", "fp32", "adagrad", "8bit"): (1.0625, 14.125),
        ("fp16", "bf16", "lion", "8bit"): (5.0625, 16.125),
        ("bf16", "bf16", "muon", "8bit"): (3.0625, 10),
        ("bf16", "fp32", "muon_momentum", "8bit"): (3.0625, 10.125),
        ("bf16", "bf16", "adam", "fp32"): (10, 26),
        ("bf16", "bf16", "adam", "bf16"): (6, 18),
        ("fp32", "fp32", "adam", "fp32"): (8, 28),
        ("fp16", "fp32", "adam", "fp32"): (12, 32),
        ("bf16", "bf16", "lion", "bf16"): (4, 14),
        ("fp32", "bf16", "adagrad", "fp32"): (4, 18),
        ("bf16", "bf16", "sgd", "fp32"): (6, 18),
        ("bf16", "bf16", "muon", "fp32"): (6, 18),
        ("bf16", "fp32", "muon_momentum", "fp32"): (6, 16),
    }
    for names, wanted in sizes.items():
        sized = _native.UpdateKind(*names)
        numel = 1 << 16
        found = (sized.optim_state_bytes(numel) / numel, sized.bytes_moved(numel) / numel)
        assert found == wanted
        assert sized.states == (2 if names[2] == "adam" else 1)
    for found in KINDS:
        bit = "sign" if found.rule in ("adam", "adagrad") else "lowest"
        bit = "remainder" if found.state_dtype == "8bit" else bit
        assert found.carrier == (bit if found.dtype == "bf16" else "none")


def test_a_tile_is_of_whole_pages() -> None:
    kind = _native.UpdateKind("bf16", "bf16", "adam", "8bit")
    assert kind.state_bytes(1) == kind.state_bytes(64) == 68
    assert kind.state_bytes(65) == 2 * 68
    assert [kind.state_at(i, 2048) for i in range(3)] == [4096, 4096 + 2176, 4096 + 2 * 2176]
    assert kind.optim_state_bytes(2048) == 3 * 4096
    assert _native.UpdateKind("bf16", "bf16").optim_state_bytes(2048) == 5 * 4096


def test_unknown_kinds_are_refused() -> None:
    states = "state_dtype is 'fp16', must be 'fp32', 'bf16' or '8bit'"
    for names, fact in (
        (("fp8", "fp32"), "dtype is 'fp8'"),
        (("fp32", "int8"), "grad_dtype is 'int8'"),
        (("fp32", "fp32", "rprop"), "rule is 'rprop'"),
        (("fp32", "fp32", "adam", "fp16"), states),
    ):
        with pytest.raises(ValueError, match=fact):
            _native.UpdateKind(*names)


def test_hyper_parameters_out_of_range_are_named() -> None:
    nan, infinity = float("nan"), float("inf")
    for field, values in {
        "lr": (-1.0, nan),
        "beta1": (1.0,),
        "beta2": (-0.1,),
        "eps": (infinity,),
        "weight_decay": (-0.1,),
        "lr_decay": (-1.0,),
        "momentum": (-0.1, infinity),
        "dampening": (nan,),
        "lr_scale": (-1.0,),
        "step": (0,),
        "grad_scale": (infinity,),
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"Hyper: {field} is"):
                _native.Hyper(**{**dataclasses.asdict(Hyper()), field: value})


def test_bad_arguments_are_named() -> None:
    hyper = _native.Hyper(lr=1e-3)
    kinds = (_native.UpdateKind("fp32", "fp32", rule) for rule in HYPERS)
    adam, lion, adagrad, sgd, muon = kinds
    with pytest.raises(ValueError, match="param is 0"):
        _native.update(adam, 0, 0, 0, [0, 0], 5, hyper)
    with pytest.raises(ValueError, match=r"states\[1\] is 0"):
        _native.update(adam, 64, 64, 0, [64, 0], 5, hyper)
    with pytest.raises(ValueError, match="its own master"):
        _native.update(adam, 64, 64, 64, [64, 64], 0, hyper)
    with pytest.raises(ValueError, match="states has 2 addresses, lion has 1"):
        _native.update(lion, 0, 0, 0, [0, 0], 0, hyper)
    with pytest.raises(ValueError, match=r"weight_decay is 0\.1.*decoupled=True"):
        _native.update(lion, 0, 0, 0, [0], 0, _native.Hyper(lr=1e-3, weight_decay=0.1))
    with pytest.raises(ValueError, match="decoupled is False.*muon"):
        _native.update(muon, 0, 0, 0, [0], 0, _native.Hyper(lr=1e-3, weight_decay=0.1))
    with pytest.raises(ValueError, match="decoupled is True.*adagrad"):
        _native.update(adagrad, 0, 0, 0, [0], 0, _native.Hyper(lr=1e-3, decoupled=True))
    with pytest.raises(ValueError, match="decoupled is True.*sgd"):
        _native.update(sgd, 0, 0, 0, [0], 0, _native.Hyper(lr=1e-3, decoupled=True))
    with pytest.raises(ValueError, match="momentum is 0, must be more than 0 with nesterov"):
        _native.Hyper(lr=1e-3, nesterov=True)
    with pytest.raises(ValueError, match=r"dampening is 0\.5, must be 0 with nesterov"):
        _native.Hyper(lr=1e-3, momentum=0.9, dampening=0.5, nesterov=True)
    for bad in (lambda: _native.Hyper(1e-3), lambda: _native.update(None, 0, 0, 0, [], 0, hyper)):
        with pytest.raises(TypeError):
            bad()
