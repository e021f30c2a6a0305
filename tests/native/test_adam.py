"""native/adam: the fused update against the oracle, bit for bit, and the split master."""

import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offload import _native
from tests.adam_oracle import Hyper, fma, split, update

DTYPES = ["fp32", "bf16", "fp16"]
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WORDS = {"fp32": np.uint32, "bf16": np.uint16, "fp16": np.uint16}
ISAS = _native.isa_available()
BLOCK = 64 * 1024  # what a worker takes at a time
HYPERS = {
    "adam": Hyper(lr=1e-2),
    "adam_decay": Hyper(lr=1e-2, weight_decay=0.1),
    "adamw": Hyper(lr=1e-2, weight_decay=0.1, decoupled=True),
    "adamw_uncorrected": Hyper(
        lr=1e-3, beta1=0.8, weight_decay=0.1, decoupled=True, bias_correction=False
    ),
}


@pytest.fixture(autouse=True)
def restore_choices() -> Iterator[None]:
    isa, threads = _native.isa(), _native.threads()
    yield
    _native.set_isa(isa)
    _native.set_threads(threads)


def unaligned(values: np.ndarray, offset: int) -> np.ndarray:
    """A copy whose address is `offset` bytes after a multiple of 64."""
    raw = np.empty(values.nbytes + 64 + offset, np.uint8)
    begin = -raw.ctypes.data % 64 + offset
    copy = raw[begin : begin + values.nbytes].view(values.dtype)
    copy[:] = values
    return copy


def to_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values as torch converts them, in the bits of `dtype`."""
    converted = torch.from_numpy(np.ascontiguousarray(values)).to(TORCH_DTYPES[dtype])
    return (
        converted.view({2: torch.int16, 4: torch.int32}[converted.itemsize])
        .numpy()
        .view(WORDS[dtype])
    )


def to_fp32(bits: np.ndarray, dtype: str) -> np.ndarray:
    signed = bits.view({2: np.int16, 4: np.int32}[bits.itemsize])
    return torch.from_numpy(signed).view(TORCH_DTYPES[dtype]).float().numpy()


def equal_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.tobytes() == right.tobytes()


class State:
    """What one parameter trains with, held as the kernel wants it."""

    def __init__(self, dtype: str, master: np.ndarray, offset: int = 0) -> None:
        zeros = np.zeros_like(master)
        self.dtype = dtype
        self.exp_avg = unaligned(zeros, offset)
        self.exp_avg_sq = unaligned(zeros, offset)
        self.param = unaligned(to_dtype(master, dtype), offset)
        self.master: np.ndarray | None = None
        if dtype == "fp16":
            self.master = unaligned(master, offset)
        elif dtype == "bf16":
            self.master = unaligned(np.zeros(len(master), np.uint16), offset)
            source = unaligned(master, offset)
            _native.split_master(
                source.ctypes.data,
                self.param.ctypes.data,
                self.master.ctypes.data,
                self.exp_avg_sq.ctypes.data,
                len(master),
            )

    def step(
        self, grad: np.ndarray, grad_dtype: str, hyper: Hyper, scale: float, begin=0, end=None
    ) -> None:
        end = len(grad) if end is None else end

        def at(array: np.ndarray) -> int:
            return array.ctypes.data + begin * array.itemsize

        _native.adam_step(
            self.dtype,
            grad_dtype,
            at(self.param),
            at(grad),
            0 if self.master is None else at(self.master),
            at(self.exp_avg),
            at(self.exp_avg_sq),
            end - begin,
            _native.AdamHyper(**dataclasses.asdict(hyper)),
            scale,
        )

    def fp32_master(self) -> np.ndarray:
        if self.dtype == "fp32":
            return self.param.view(np.float32)
        if self.dtype == "fp16":
            return self.master
        target = np.empty(len(self.param), np.float32)
        _native.join_master(
            self.param.ctypes.data,
            self.master.ctypes.data,
            self.exp_avg_sq.ctypes.data,
            target.ctypes.data,
            len(target),
        )
        return target

    def magnitudes(self) -> np.ndarray:
        """exp_avg_sq without the carries."""
        return np.abs(self.exp_avg_sq)

    def bytes(self) -> bytes:
        parts = [self.param, self.exp_avg, self.exp_avg_sq]
        return b"".join(p.tobytes() for p in parts + ([] if self.master is None else [self.master]))


def gradients(numel: int, dtype: str, seed: int) -> np.ndarray:
    """Of magnitudes from subnormal to large, some of them zero."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(numel) * 10.0 ** random.uniform(-9, 3, numel)
    values[random.random(numel) < 0.05] = 0.0
    return to_dtype(values.astype(np.float32), dtype)


def masters(numel: int, seed: int = 1) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_normal(numel) * 10.0 ** random.uniform(-6, 1, numel)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_the_oracles(isa: str, hyper: Hyper, dtype: str, grad_dtype: str) -> None:
    _native.set_isa(isa)
    for numel, offset in [(0, 0), (1, 1), (15, 2), (16, 0), (17, 4), (1003, 3)]:
        w = masters(numel)
        m = v = np.zeros_like(w)
        state = State(dtype, w, offset)
        for step in range(1, 4):
            grad = unaligned(gradients(numel, grad_dtype, seed=step), offset)
            now = dataclasses.replace(hyper, step=step)
            state.step(grad, grad_dtype, now, scale=0.3)
            w, m, v = update(w, m, v, to_fp32(grad, grad_dtype), now, grad_scale=0.3)
            assert equal_bits(state.fp32_master(), w)
            assert equal_bits(state.exp_avg, m)
            assert equal_bits(state.magnitudes(), v)
            assert equal_bits(state.param, to_dtype(w, dtype))


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_isa_threads_or_boundaries(dtype: str, grad_dtype: str) -> None:
    numel = 3 * BLOCK + 77
    hyper = HYPERS["adamw"]
    grads = [gradients(numel, grad_dtype, seed) for seed in range(2)]

    def train(cuts: list[int]) -> bytes:
        state = State(dtype, masters(numel), offset=2)
        for step, grad in enumerate(grads, start=1):
            now = dataclasses.replace(hyper, step=step)
            for begin, end in itertools.pairwise([0, *cuts, numel]):
                state.step(grad, grad_dtype, now, 1.0, begin, end)
        return state.bytes()

    wanted = train([])
    for isa, threads in itertools.product(ISAS, (1, 2, 3)):
        _native.set_isa(isa)
        _native.set_threads(threads)
        assert train([]) == wanted, (isa, threads)
    for cuts in ([1], [BLOCK - 1, BLOCK + 5], [7, 2 * BLOCK]):
        assert train(cuts) == wanted, cuts


@pytest.mark.parametrize("isa", ISAS)
def test_every_half_precision_gradient_is_converted_exactly(isa: str) -> None:
    _native.set_isa(isa)
    for dtype in ("bf16", "fp16"):
        grad = np.arange(1 << 16, dtype=np.uint16)
        state = State("fp32", np.zeros(len(grad), np.float32))
        state.step(grad, dtype, Hyper(lr=0.0, beta1=0.0), 1.0)  # exp_avg = 1 * g + 0
        values = to_fp32(grad, dtype)
        values[values == 0] = 0  # -0 + 0 = 0
        number = ~np.isnan(values)
        assert equal_bits(state.exp_avg[number], values[number])
        assert np.isnan(state.exp_avg[~number]).all()


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
    state = State(dtype, master)
    if dtype == "fp16":
        state.step(np.zeros(len(master), np.float32), "fp32", Hyper(lr=0.0), 1.0)  # w stays
    wanted = to_dtype(master, dtype)
    number = ~np.isnan(master)
    assert equal_bits(state.param[number], wanted[number])
    assert np.isnan(to_fp32(state.param[~number], dtype)).all()


def words(numel: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    tie = st.integers(0, 0xFFFF).map(lambda upper: upper << 16 | 0x8000)
    special = st.sampled_from(
        [0, 1, 0x80000000, 0x007FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF]
    )
    return hnp.arrays(np.uint32, numel, elements=st.integers(0, (1 << 32) - 1) | tie | special)


@pytest.mark.parametrize("isa", ISAS)
@given(bits=words(st.integers(0, 50)), kept=words(st.just(50)))
def test_split_and_join_are_exact(isa: str, bits: np.ndarray, kept: np.ndarray) -> None:
    _native.set_isa(isa)
    master, numel = bits.view(np.float32), len(bits)
    param, remainder = np.zeros(numel, np.uint16), np.zeros(numel, np.uint16)
    exp_avg_sq, target = kept.copy(), np.zeros(numel, np.float32)
    _native.split_master(
        master.ctypes.data,
        param.ctypes.data,
        remainder.ctypes.data,
        exp_avg_sq.ctypes.data,
        numel,
    )
    wanted_param, wanted_remainder, carry = split(master)
    assert equal_bits(param, wanted_param)
    assert equal_bits(remainder, wanted_remainder)
    assert equal_bits(exp_avg_sq[:numel], (kept[:numel] & 0x7FFFFFFF) | carry << 31)
    assert equal_bits(exp_avg_sq[numel:], kept[numel:])
    _native.join_master(
        param.ctypes.data,
        remainder.ctypes.data,
        exp_avg_sq.ctypes.data,
        target.ctypes.data,
        numel,
    )
    number = ~np.isnan(master)
    assert equal_bits(target[number], master[number])
    assert np.isnan(target[~number]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_gradients_spread_no_further_than_their_element(dtype: str) -> None:
    grad = np.ones(40, np.float32)
    grad[3], grad[17], grad[39] = np.inf, np.nan, -np.inf
    for isa in ISAS:
        _native.set_isa(isa)
        state = State(dtype, masters(40))
        state.step(grad, "fp32", HYPERS["adam"], 1.0)
        poisoned = np.isnan(state.fp32_master())
        assert poisoned.nonzero()[0].tolist() == [3, 17, 39]
        assert np.isnan(to_fp32(state.param[poisoned], dtype)).all()


def test_subnormals_survive_the_callers_flush_to_zero() -> None:
    grad = np.full(1000, 1e-42, np.float32)
    state = State("fp32", np.zeros(1000, np.float32))
    torch.set_flush_denormal(True)
    try:
        state.step(grad, "fp32", Hyper(beta1=0.0, lr=0.0), 1.0)
    finally:
        torch.set_flush_denormal(False)
    assert equal_bits(state.exp_avg, grad)


@pytest.mark.parametrize("decoupled", [False, True])
def test_agrees_with_torch(decoupled: bool) -> None:
    numel, lr = 20_000, 1e-3
    w = masters(numel)
    param = torch.nn.Parameter(torch.from_numpy(w.copy()))
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = cls([param], lr=lr, weight_decay=0.01)
    state = State("fp32", w)
    for step in range(1, 11):
        grad = np.random.default_rng(step).standard_normal(numel).astype(np.float32)
        param.grad = torch.from_numpy(grad)
        reference.step()
        state.step(grad, "fp32", Hyper(lr, weight_decay=0.01, decoupled=decoupled, step=step), 1.0)
    # Each of the ten updates, of about lr, may round differently by a unit in the last place.
    theirs = param.detach().numpy()
    ulp = np.spacing(np.maximum(np.abs(w), np.float32(10 * lr)))
    distance = np.abs(state.fp32_master() - theirs) / ulp
    assert distance.max() <= 10
    assert distance.mean() < 0.5


def test_fma_of_the_oracle_rounds_once() -> None:
    """Against exact rational arithmetic."""
    from fractions import Fraction

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


def test_bad_arguments_are_named() -> None:
    good = dataclasses.asdict(Hyper())
    for field, value in [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", float("inf")),
        ("weight_decay", -0.1),
        ("step", 0),
    ]:
        with pytest.raises(ValueError, match=f"AdamHyper: {field} is"):
            _native.AdamHyper(**{**good, field: value})
    hyper = _native.AdamHyper(**good)
    with pytest.raises(ValueError, match="'fp8'"):
        _native.adam_step("fp8", "fp32", 0, 0, 0, 0, 0, 0, hyper, 1.0)
    with pytest.raises(ValueError, match="param is 0"):
        _native.adam_step("fp32", "fp32", 0, 0, 0, 0, 0, 5, hyper, 1.0)
    with pytest.raises(ValueError, match="its own master"):
        _native.adam_step("fp32", "fp32", 64, 64, 64, 64, 64, 0, hyper, 1.0)
    with pytest.raises(ValueError, match="grad_scale"):
        _native.adam_step("fp32", "fp32", 0, 0, 0, 0, 0, 0, hyper, float("inf"))


def test_isa_can_be_chosen_by_name_only_if_available() -> None:
    assert ISAS[-1] == "scalar"
    assert set(ISAS) <= set(_native.build_info()["isas"])
    for isa in ISAS:
        _native.set_isa(isa)
        assert _native.isa() == isa
    with pytest.raises(ValueError, match=r"'vax'.*scalar"):
        _native.set_isa("vax")
    assert _native.isa() == "scalar"


@pytest.mark.parametrize(("wanted", "found"), [("scalar", "scalar"), ("vax", "ValueError")])
def test_isa_from_the_environment(wanted: str, found: str) -> None:
    script = (
        "from offload import _native\n"
        "try: print(_native.isa())\n"
        "except ValueError as error: print('ValueError', error)\n"
    )
    root = str(Path(_native.__file__).parents[1])
    environment = {**os.environ, "HETERO_ISA": wanted, "PYTHONPATH": root}
    run = [sys.executable, "-c", script]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split()[0] == found


def workers_become(count: int) -> bool:
    """Waits until that many workers live: the kernel lists a thread for a moment after its end."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        names = []
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                names.append(path.read_text().strip())
        if names.count("hetero-worker") == count:
            return True
        time.sleep(0.001)
    return False


def test_workers_start_at_first_use_and_stop_when_told() -> None:
    state = State("fp32", masters(4 * BLOCK))
    grad = gradients(4 * BLOCK, "fp32", seed=0)
    _native.shutdown_workers()
    _native.set_threads(3)
    assert _native.threads() == 3
    assert workers_become(0)
    state.step(grad, "fp32", Hyper(), 1.0)
    assert workers_become(2)
    _native.shutdown_workers()
    assert workers_become(0)
    state.step(grad, "fp32", Hyper(step=2), 1.0)
    assert workers_become(2)
    _native.set_threads(1)
    assert workers_become(0)
    for count in (0, -1):
        with pytest.raises(ValueError, match="count"):
            _native.set_threads(count)


def test_concurrent_callers_take_turns() -> None:
    _native.set_threads(2)
    numel = 2 * BLOCK + 3
    grad = gradients(numel, "bf16", seed=0)
    states = [State("bf16", masters(numel)) for _ in range(4)]

    def train(state: State) -> None:
        for step in range(1, 11):
            state.step(grad, "bf16", Hyper(step=step), 1.0)

    callers = [threading.Thread(target=train, args=(state,)) for state in states[1:]]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    train(states[0])
    assert len({state.bytes() for state in states}) == 1


def test_a_forked_child_has_workers_of_its_own() -> None:
    _native.set_threads(2)
    state = State("fp32", masters(4 * BLOCK))
    grad = gradients(4 * BLOCK, "fp32", seed=0)
    state.step(grad, "fp32", Hyper(), 1.0)
    child = os.fork()
    if child == 0:
        state.step(grad, "fp32", Hyper(step=2), 1.0)
        os._exit(0 if workers_become(1) and _native.threads() == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
