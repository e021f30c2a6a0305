"""Budgets hold: under limits of the operating system, and whatever models and loops do."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import hetero
from bench.work.gpt import Gpt
from bench.work.gpt import Shape as GptShape
from bench.work.gpt_training import LIMITS, Spec, memory_bytes, run
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier
from tests.support.ranks.processes import run_forked
from tests.support.training.loops import Run

MIB = 1 << 20

# Under limits of the operating system

SHAPE = {"layers": 6, "width": 512, "heads": 8, "seq_len": 64, "batch_size": 1}
VOCABULARY = 1024
PARAMS = 19e6
HOST_MEMORY = 38 * MIB  # an eighth of what others hold: 16 bytes a parameter
# Of 64 tokens, per layer that is not recomputed, and gradients in autograd's hands.
ACTIVATIONS = 6 * 4 * MIB + 32 * MIB
# Counted by limits although nobody touches it: stacks of eight threads, slots of pools that are
# used only when there is RAM to spare.
UNTOUCHED = 8 * 8 * MIB + 32 * MIB
_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
# (Processes that have imported everything have more of their own, which `framework` measures.)


def limit(nbytes: dict[str, int]) -> None:
    """Limits this process for good, whose threads have no arenas of their own from now on: malloc
    would reserve 64 MiB of addresses for each."""
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
    for name, number in nbytes.items():
        resource.setrlimit(LIMITS[name], (number, number))


def plain(layers: int, trains: bool, limits: dict[str, int]) -> dict[str, int]:
    """What plain PyTorch takes of all kinds of memory."""
    limit(limits)
    model = Gpt(GptShape(**SHAPE | {"layers": layers}), VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randint(0, 256, (1, 64))).backward()
    found = memory_bytes()
    if trains:
        optimizer.step()
    return found


def limited(path: Path, limits: dict[str, int]) -> dict[str, Any]:
    """Trains a model of SHAPE within HOST_MEMORY and the limits; what it took."""
    limit(limits)
    options = {"placement_policy": "nvme", "nvme_path": str(path), "host_memory": HOST_MEMORY}
    return run(Spec("hetero-tiles-checkpoints", SHAPE, VOCABULARY, options | {"dtype": "bf16"}))


@pytest.fixture(scope="module")
def framework() -> dict[str, int]:
    """What a plain run takes, with a model of a single layer."""
    found: dict[str, int] = run_forked(plain, 1, False, {})
    return found


def test_training_under_limits_of_the_process(framework: dict[str, int], tmp_path: Path) -> None:
    """Private memory and address space are limited to the budget beside what a plain run takes."""
    limits = {
        "data": framework["VmData"] + HOST_MEMORY + ACTIVATIONS + UNTOUCHED,
        "address": framework["VmPeak"] + HOST_MEMORY + ACTIVATIONS + UNTOUCHED,
    }
    found = run_forked(limited, tmp_path, limits)
    assert found["status"] == "trained", found["error"]
    assert found["params"] > PARAMS
    assert all(map(math.isfinite, found["losses"]))
    assert found["peak_managed_bytes"]["host"] <= HOST_MEMORY
    assert found["peak_managed_bytes"]["disk"] > 10 * PARAMS
    assert found["peak_bytes"] <= HOST_MEMORY + framework["VmHWM"] + ACTIVATIONS
    # The limit is one: what the model takes in memory does not fit below it.
    with pytest.raises((RuntimeError, MemoryError), match="allocate|memory"):
        run_forked(plain, SHAPE["layers"], True, {"data": limits["data"]})


def test_a_limit_that_is_too_small_is_an_error_and_no_crash(
    framework: dict[str, int], tmp_path: Path
) -> None:
    found = run_forked(limited, tmp_path, {"data": framework["VmData"] + HOST_MEMORY // 4})
    assert found["status"] in ("failed", "refused")
    assert found["error"]
    assert list(tmp_path.iterdir()) == []


# Whatever models and loops do


@dataclass(frozen=True)
class Shape:
    """A random net: blocks of one width, some of them frozen; `tied`: the last has the first's
    matrix."""

    width: int
    blocks: int
    tied: bool
    frozen: frozenset[int]
    norms: bool

    def make(self) -> Net:
        torch.manual_seed(self.width)
        return Net(self)


class Net(nn.Module):
    """Residual blocks that are used in the order that is asked for."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(shape.blocks))
        self.norms = nn.ModuleList(
            nn.LayerNorm(width) if shape.norms else nn.Identity() for _ in range(shape.blocks)
        )
        self.head = nn.Linear(width, width, bias=False)
        if shape.tied:
            self.head.weight = self.blocks[0].weight
        for number in shape.frozen:
            self.blocks[number].requires_grad_(False)

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for number in order:
            x = x + torch.tanh(self.blocks[number](self.norms[number](x)))
        return self.head(x)


@dataclass(frozen=True)
class Step:
    """What a step does: blocks in this order for each micro-batch, and what else."""

    orders: tuple[tuple[int, ...], ...]
    rows: int = 3
    evaluates: bool = False  # before it, and between micro-batches
    clips: bool = True
    keeps: bool = False  # gradients until the next step's backward adds to them


@dataclass(frozen=True)
class Place:
    """Options, and how many times the smallest budgets that work are given."""

    options: dict[str, Any] = field(hash=False)
    host: float = 1.0
    device: float = 1.0
    disk: float = 1.0


shapes = st.integers(1, 4).flatmap(
    lambda blocks: st.builds(
        Shape,
        width=st.sampled_from([16, 48, 64, 96, 130]),
        blocks=st.just(blocks),
        tied=st.booleans(),
        frozen=st.frozensets(st.integers(0, blocks - 1), max_size=blocks - 1),
        norms=st.booleans(),
    )
)


def steps_of(shape: Shape) -> st.SearchStrategy[list[Step]]:
    """Two to five steps; most use all blocks in order, as training does."""
    usual = tuple(range(shape.blocks))
    orders = st.just(usual) | st.lists(st.integers(0, shape.blocks - 1), max_size=6).map(tuple)
    return st.lists(
        st.builds(
            Step,
            orders=st.lists(orders, min_size=1, max_size=3).map(tuple),
            rows=st.sampled_from([1, 3, 17]),
            evaluates=st.booleans(),
            clips=st.booleans(),
            keeps=st.booleans(),
        ),
        min_size=2,
        max_size=5,
    )


slack = st.sampled_from([1.0, 1.0, 1.1, 1.5, 4.0])
places = st.builds(
    Place,
    options=st.fixed_dictionaries(
        {
            "placement_policy": st.sampled_from(["nvme", "auto", "cpu"]),
            "backend": st.sampled_from(["cpu", "emulated"]),
            "dtype": st.sampled_from(["fp32", "bf16", "fp16"]),
            "grad_dtype": st.sampled_from([None, None, "fp32"]),
            "chunk_numel": st.sampled_from([4096, 8192, 20480]),
            "debug": st.fixed_dictionaries(
                {"io_engine": st.sampled_from(["io_uring", "threads"]), "prefetch": st.booleans()}
            ),
        }
    ),
    host=slack,
    device=slack,
    disk=slack,
)


def smallest(shape: Shape, options: dict[str, Any]) -> dict[str, int]:
    """The budgets that refusals come down to, from next to nothing on."""
    budgets = {"host_memory": 1}
    if options["backend"] == "emulated":
        budgets["device_memory"] = 1
    if options["placement_policy"] != "cpu":
        budgets["nvme_capacity"] = 1
    patterns = {
        "host_memory": r"host_memory is .*?smallest that works is .*? \((\d+) bytes\)",
        "device_memory": r"device_memory is .*?smallest that works is .*? \((\d+) bytes\)",
        "nvme_capacity": r"\((\d+) bytes\) go to disk",
    }
    for _ in range(40):
        model = shape.make()
        optimizer = hetero.HybridAdam(model.parameters())
        try:
            hetero.initialize(model, optimizer, **options, **budgets)
        except hetero.BudgetError as refusal:
            named = {
                name: int(found[1])
                for name, pattern in patterns.items()
                if (found := re.search(pattern, str(refusal)))
            }
            missing = re.search(r"would pass the (\w+) budget of .*? by (\d+) bytes", str(refusal))
            if missing:  # while the model is adopted: no plan is made yet
                name = {"disk": "nvme_capacity"}.get(missing[1], f"{missing[1]}_memory")
                named[name] = budgets[name] + int(missing[2])
            more = {name: n for name, n in named.items() if n > budgets.get(name, n)}
            if not more:
                pytest.fail(f"{budgets} are refused without a larger one: {refusal}")
            budgets |= more
        else:
            optimizer.engine.close()
            return budgets
    raise AssertionError(f"refusals do not come to an end: {budgets}")


def train(
    shape: Shape, steps: list[Step], after_step: Callable[[Any], None], **options: Any
) -> Run:
    """Trains; `after_step` gets the engine."""
    model = shape.make()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    hetero.initialize(model, optimizer, initial_loss_scale=64.0, **options)
    engine = optimizer.engine
    run = Run()
    try:
        for number, step in enumerate(steps):
            generator = torch.Generator().manual_seed(number)
            for order in step.orders:
                x = torch.randn(step.rows, shape.width, generator=generator)
                if step.evaluates:
                    with torch.no_grad():
                        run.losses.append(model(x, tuple(reversed(order))).float().sum().item())
                loss = (model(x, order).float() - 1).square().mean()
                if loss.requires_grad:  # a frozen head alone has nothing to train
                    optimizer.backward(loss)
                run.losses.append(loss.item())
            if step.clips:
                run.norms.append(hetero.clip_grad_norm_(trained, 0.5).item())
            optimizer.step()
            if not step.keeps:
                optimizer.zero_grad()
            after_step(engine)
        run.masters = hetero.masters(trained)
        for param in model.parameters():
            with hetero.gathered(param):
                run.params.append(param.detach().clone())
    finally:
        engine.close()
    assert set(engine.ledger.in_use_bytes.values()) == {0}
    return run


@contextlib.contextmanager
def watched_ledgers() -> Iterator[list[int]]:
    """Fails at once where the bytes in use of a tier pass its budget; counts changes."""
    changes = [0]
    change = Ledger._change

    def checked(ledger: Ledger, tier: Tier, account: Account, nbytes: int) -> None:
        change(ledger, tier, account, nbytes)
        changes[0] += 1
        for name, budget in ledger.budget_bytes.items():
            used = ledger.in_use_bytes[name]
            assert budget is None or used <= budget, (name, account, used, budget)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "_change", checked)
        yield changes


def check(shape: Shape, steps: list[Step], place: Place) -> None:
    """No budget is passed, and the bits are those of policy cpu."""
    kept = ("dtype", "grad_dtype")
    expected = train(
        shape, steps, lambda engine: None, placement_policy="cpu",
        **{name: place.options[name] for name in kept},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        options = dict(place.options)
        if options["placement_policy"] != "cpu":
            options["nvme_path"] = folder
        budgets = smallest(shape, options)
        for name, more in (
            ("host_memory", place.host),
            ("device_memory", place.device),
            ("nvme_capacity", place.disk),
        ):
            if name in budgets:
                budgets[name] = int(budgets[name] * more)
        tiers = {
            "host": budgets["host_memory"],
            "device": budgets.get("device_memory"),
            "disk": budgets.get("nvme_capacity"),
        }

        def after_step(engine: Any) -> None:
            for tier, most in tiers.items():
                peak = engine.ledger.peak_bytes[tier]
                assert most is None or peak <= most, (tier, peak, most)

        with watched_ledgers() as changes:
            found = train(shape, steps, after_step, **options, **budgets)
        assert changes[0] > 2
        assert found.same_bits(expected)
        gc.collect()
        assert list(Path(folder).iterdir()) == []


ALL = Shape(64, 3, tied=True, frozen=frozenset({1}), norms=True)
DEVIATING = [
    Step(orders=((0, 1, 2),)),
    Step(orders=((0, 1, 2), (2, 0)), evaluates=True),
    Step(orders=((),), rows=17, keeps=True),
    Step(orders=((1, 1, 0), (2, 1, 0)), clips=False),
]
OPTIONS: dict[str, Any] = {
    "placement_policy": "nvme",
    "backend": "cpu",
    "dtype": "bf16",
    "grad_dtype": None,
    "chunk_numel": 4096,
    "debug": {"io_engine": "io_uring", "prefetch": True},
}
EMULATED = {**OPTIONS, "placement_policy": "auto", "backend": "emulated"}
cases = shapes.flatmap(lambda shape: st.tuples(st.just(shape), steps_of(shape), places))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Such small products are not worth a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases)
@example((ALL, DEVIATING, Place(OPTIONS)))
@example((ALL, DEVIATING, Place({**OPTIONS, "dtype": "fp16"}, host=1.5)))
@example((ALL, DEVIATING, Place({**EMULATED, "placement_policy": "nvme"}, device=1.5)))
@example((replace(ALL, width=130), DEVIATING, Place({**EMULATED, "grad_dtype": "fp32"})))
def test_no_budget_is_passed_whatever_happens(case: tuple[Shape, list[Step], Place]) -> None:
    check(*case)


@pytest.mark.extra
@pytest.mark.usefixtures("one_thread")
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases)
def test_no_budget_is_passed_whatever_happens_long(
    case: tuple[Shape, list[Step], Place],
) -> None:
    check(*case)


def test_a_budget_that_is_passed_is_noticed() -> None:
    ledger = Ledger({Tier.HOST: 100})
    with watched_ledgers(), pytest.raises(AssertionError):
        ledger._change(Tier.HOST, Account.PARAM, 101)
