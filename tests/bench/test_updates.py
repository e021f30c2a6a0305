"""bench/work/updates.py and the peers of bench.adam: arrays, traffic, kernels of arrival."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.harness.program import parse_count
from bench.kernels import __main__ as program
from bench.peers.adam import AdamPeer
from bench.peers.timing import timed_rate
from bench.work.updates import DTYPES, NORM_DTYPES, RULES, STATE_DTYPES, TORCH_DTYPES, Updates
from offload import _native
from offload._native import UpdateKind

KINDS = [
    UpdateKind(dtype, grad_dtype, rule, state_dtype)
    for rule in RULES
    for dtype, grad_dtype in DTYPES
    for state_dtype in STATE_DTYPES
]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Any:
    before = torch.get_num_threads(), _native.threads()
    yield
    torch.set_num_threads(before[0])
    _native.set_threads(before[1])


@pytest.mark.parametrize(
    "kind", KINDS, ids=lambda k: f"{k.rule}-{k.dtype}-{k.grad_dtype}-{k.state_dtype}"
)
def test_every_kernel_updates_numbers_of_a_training(kind: UpdateKind) -> None:
    """Timing zeros, denormals or NaN would time something else; timing no update, nothing."""
    updates = Updates(5000, repeats=1)
    updates.fill(UpdateKind("fp32", "fp32", "adam"))  # leftovers of another variant
    updates.fill(kind)
    is_momentum = kind.rule == "muon_momentum"
    param_dtype = "bf16" if is_momentum else kind.dtype
    parts = {"param": param_dtype, "grad": kind.grad_dtype}
    if kind.dtype == "fp16":
        parts["master"] = "fp32"

    def contents() -> dict[str, torch.Tensor]:
        found = {part: updates.tensor(part, TORCH_DTYPES[name]) for part, name in parts.items()}
        found |= {f"state {i}": updates.state(kind, i) for i in range(kind.states)}
        return {part: tensor.clone() for part, tensor in found.items()}

    before = contents()
    updates.run(kind)
    for part, tensor in contents().items():
        for values in (before[part].float(), tensor.float()):
            assert values.isfinite().all()
            normal = values.abs() >= torch.finfo(torch.float16).smallest_normal / 100
            assert normal.float().mean() > 0.2, part
            assert values.abs().max() < 10
        # What an update changes: all but the gradient, and what Muon's other pass is for.
        others = {"master"} if is_momentum else set()
        # (Else the carry's bit changes.)
        if kind.rule == "muon" and (kind.dtype != "bf16" or kind.state_dtype == "8bit"):
            others = {"state 0"}
        assert torch.equal(before[part], tensor) == (part in {"grad", *others}), part


def test_every_combination_is_measured_once() -> None:
    updates = Updates(64, repeats=1)
    names = [variant.name for variant in updates.updates()]
    assert len(set(names)) == len(names) == 90
    assert "adam bf16/bf16, states fp32" in names
    assert [variant.name for variant in updates.norms()] == [
        f"sum_of_squares {dtype}" for dtype in NORM_DTYPES
    ]


def test_traffic_per_parameter() -> None:
    """Read once and written once, by the dtypes alone: hetero's sizes are not taken on trust."""
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2, "8bit": 1 + 4 / 64}
    extra = {"bf16": 2, "fp16": 4, "fp32": 0}
    updates = Updates(64, repeats=1)
    for kind in KINDS:
        states = 2 if kind.rule == "adam" else 1
        kept = sizes[kind.dtype] + extra[kind.dtype] + states * sizes[kind.state_dtype]
        if kind.rule == "muon_momentum":  # directions in bf16, and no parameter
            kept = sizes["bf16"] + sizes[kind.state_dtype]
        if kind.rule == "muon" and kind.state_dtype == "8bit":  # which is left alone
            kept -= sizes["8bit"]
        assert updates.update(kind).bytes_per_param == 2 * kept + sizes[kind.grad_dtype]
    assert updates.stream().bytes_per_param == 4 * 4 + 3 * 4
    assert [norm.bytes_per_param for norm in updates.norms()] == [2, 2, 4]


def test_the_stream_is_four_reads_and_three_writes() -> None:
    updates = Updates(5000, repeats=1)
    sample = updates.stream().sample()
    assert sample["gbps"] == pytest.approx(sample["params_per_s"] * 28 / 1e9)
    parts = ("param", "grad", "state 0", "state 1")
    param, grad, first, second = (updates.tensor(part, torch.float32) for part in parts)
    # Filled alike, then two times (the warm-up and the timed one) the gradient was added.
    for changed in (param, first, second):
        assert torch.allclose(changed, 3 * grad)


def test_the_norms_see_all_elements() -> None:
    updates = Updates(5000, repeats=1)
    for variant, dtype in zip(updates.norms(), NORM_DTYPES, strict=True):
        variant.sample()
        values = updates.tensor("grad", TORCH_DTYPES[dtype]).double()
        address = updates._address("grad")
        found = _native.sum_of_squares(dtype, address, 5000)
        assert found == pytest.approx(float((values * values).sum()))
        assert found > 0


def test_the_first_update_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    calls = []

    def update() -> None:
        calls.append(1)
        clock[0] += 100.0 if len(calls) == 1 else 2.0

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert timed_rate(update, numel=10, repeats=3) == {"params_per_s": 5.0}
    assert len(calls) == 4


def test_the_pool_is_as_large_as_said() -> None:
    updates = Updates(1 << 20, repeats=1)
    assert updates._arena.nbytes == Updates.needed_bytes(1 << 20) == 5 * 4 << 20


def test_torch_peer_updates() -> None:
    for kind in ("fp32", "bf16"):
        setup = {"numel": 64, "threads": 1, "kind": f"torch {kind}", "repeats": 2}
        peer = AdamPeer(setup)
        assert peer.sample({})["params_per_s"] > 0
        state = peer._optimizer.state[peer._param]
        assert state["step"].item() == 1 + 1 + 2  # making the state, the warm-up, two timed
        for array in (peer._param, peer._param.grad, state["exp_avg"], state["exp_avg_sq"]):
            assert array.dtype == TORCH_DTYPES[kind]


@pytest.mark.parametrize(
    ("text", "count"),
    [("64Mi", 64 << 20), ("500e6", 500_000_000), ("1.5K", 1500), ("1.5 ki", 1536), ("7", 7)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count("--numel", text) == count


@pytest.mark.parametrize("text", ["", "many", "0", "-1", "1.5", "1e-3", "64MiB", "1e999", "nan"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match="--numel"):
        parse_count("--numel", text)


@pytest.mark.parametrize(("source_dtype", "dtype"), [("bf16", "bf16"), ("bf16", "fp32")])
def test_a_gradient_arrives_in_all_ways_alike(source_dtype: str, dtype: str) -> None:
    updates = Updates(5000, repeats=1)
    found: dict[str, list[torch.Tensor]] = {"copy": [], "add": []}
    for variant in updates.writes(source_dtype, dtype):
        variant.sample()
        kept = updates.tensor("grad", TORCH_DTYPES[dtype]).clone()
        found[variant.name.split()[0].rstrip(",")].append(kept)
    for kept in found.values():
        assert len(kept) == 3
        assert all(one.equal(kept[0]) for one in kept)
    assert not found["copy"][0].equal(found["add"][0])


def test_a_turn_goes_through_the_buffer_as_often_as_makes_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "TURN_BYTES", 10_000)
    for nbytes, passes in ((4096, 3), (10_000, 1), (20_000, 1)):
        calls: list[int] = []
        program._passes(lambda calls=calls: calls.append(1), nbytes)
        assert len(calls) == passes
