"""hetero/runtime: rates from what a training counts, and what they say of a step's limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hetero
from hetero.planning.candidates import place
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Budgets
from hetero.planning.step_cost import Computing
from hetero.runtime import step_watch
from hetero.runtime.step_watch import (
    Counters,
    LearnedRates,
    MeasuredStep,
    StepPredictions,
    counters_of,
)
from offload.memory.tiers import Tier
from tests.support.training.loops import batches, build, tiny_gpt2
from tests.support.training.planning import (
    AMPLE,
    BF16,
    SLOT,
    layout_of,
    make_profile,
    make_spec,
    separate_profile,
)

STEP = Counters(nvme_bytes=60.0, nvme_s=30.0, update_bytes=80.0, update_s=8.0)


class Counting:
    """Counters and a clock that a test advances."""

    def __init__(self) -> None:
        self.now = Counters()
        self.now_s = 0.0

    def step(self, learned: Any, moved: Counters, seconds: float) -> None:
        self.now = self.now.since(Counters().since(moved))
        self.now_s += seconds
        learned.end_step()

    def learned(self) -> LearnedRates:
        return LearnedRates(lambda: self.now, lambda: self.now_s)


def test_only_the_last_steps_count() -> None:
    counting = Counting()
    learned = counting.learned()
    for number in range(20):
        counting.step(learned, replace(STEP, nvme_s=1.0 if number > 10 else 1e9), 40.0)
    found = learned.rates(["bf16"], separate=False)
    assert found is not None
    assert found.nvme_read_bytes_per_s == pytest.approx(60.0)


def test_after_homes_have_moved_all_begins_anew() -> None:
    counting = Counting()
    learned = counting.learned()
    for _ in range(3):
        counting.step(learned, STEP, 40.0)
    counting.now = Counters()  # other pipelines, which have counted nothing yet
    counting.now_s += 1e6
    learned.restart()
    assert learned.steps == 0
    for _ in range(2):
        counting.step(learned, STEP, 40.0)
    assert learned.per_step == STEP
    assert learned.step_s == 40.0


def test_a_link_has_rates_once_both_ways_were_used() -> None:
    counting = Counting()
    learned = counting.learned()
    both = replace(STEP, h2d_bytes=8.0, h2d_s=2.0, d2h_bytes=9.0, d2h_s=3.0)
    for moved in (STEP, STEP):
        counting.step(learned, moved, 40.0)
    assert learned.rates(["bf16"], separate=True) is None
    counting.step(learned, both, 40.0)
    found = learned.rates(["bf16"], separate=True)
    assert found is not None
    assert (found.h2d_bytes_per_s, found.d2h_bytes_per_s) == (4.0, 3.0)
    assert found.separate


def test_without_a_disk_nothing_is_said_of_it() -> None:
    counting = Counting()
    learned = counting.learned()
    for _ in range(2):
        counting.step(learned, replace(STEP, nvme_bytes=0.0, nvme_s=0.0), 40.0)
    found = learned.rates(["bf16"], separate=False)
    assert found is not None
    assert found.nvme_read_bytes_per_s is None


class Steps:
    """StepPredictions of a made-up engine, whose chunk groups a test has placed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, overlap: str = "none") -> None:
        self.counting = Counting()
        self.tracer: Any = SimpleNamespace(latest=None)
        layout = layout_of(*[SLOT] * 12)
        spec = make_spec(layout, Budgets(100 * SLOT, AMPLE, under_construction=False))
        self.group = ChunkGroupPlan(spec, place(spec))
        assert Tier.DISK in self.group.placement.optim_state
        self.notes: list[str] = []
        self.speculates = True
        world = SimpleNamespace(size=1, local_ranks=1, is_on_several_machines=False)
        group: Any = SimpleNamespace(world=world)
        shared: Any = SimpleNamespace(
            ledger=SimpleNamespace(budget_bytes=dict.fromkeys(("device", "host", "disk"))),
            backend=SimpleNamespace(separate=False),
            config=hetero.Config.make(debug={"overlap_updates": overlap}),
            notes=self.notes,
        )
        monkeypatch.setattr(step_watch, "counters_of", lambda *_: self.counting.now)
        self.predictions = StepPredictions(
            [group],
            shared,
            lambda: [self.group],
            self.tracer,
            lambda: self.speculates,
            clock=lambda: self.counting.now_s,
        )

    def make(self, moved: Counters, seconds: float, computing_s: float, count: int = 1) -> None:
        computing = Computing(computing_s / 3, computing_s * 2 / 3)
        self.tracer.latest = MeasuredStep(1, computing, 0, 0)
        for _ in range(count):
            self.counting.step(self.predictions, moved, seconds)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def streamed(steps: Steps, rate: float) -> Counters:
    """What a step of the placement moves at `rate` bytes per second, and its update."""
    slot, made = steps.group.spec.slot, steps.group.placement
    missed = made.optim_state.count(Tier.DISK) - made.buffers
    nbytes = 2 * missed * slot.optim_state
    updated = 12 * SLOT * BF16.update_bytes
    return Counters(
        nvme_bytes=nbytes, nvme_s=nbytes / rate, update_bytes=updated, update_s=updated / 1e9
    )


def test_a_step_is_predicted_by_its_own_rates(steps: Steps) -> None:
    assert steps.predictions.plans() == []
    assert "no profile of this machine" in steps.predictions.explain()
    moved = streamed(steps, 1e4)
    steps.make(moved, 30.0, computing_s=6.0, count=4)
    (made,) = steps.predictions.plans()
    assert made.cost.traffic["nvme_read"] + made.cost.traffic["nvme_written"] == moved.nvme_bytes
    assert made.cost.busy_s["NVMe"] == pytest.approx(moved.nvme_s)
    assert made.cost.busy_s["compute"] == pytest.approx(6.0)
    assert made.cost.bound == "NVMe"
    table = steps.predictions.explain()
    assert "bound by: NVMe" in table
    assert "last 3 steps" in table
    assert "is estimated" not in table


def test_a_step_whose_guess_is_wrong_is_predicted_without_updates_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, "auto")
    steps.make(streamed(steps, 1e4), 30.0, computing_s=6.0, count=4)
    found = {}
    for steps.speculates in (True, False):
        (made,) = steps.predictions.plans()
        found[steps.speculates] = [phase.name for phase in made.cost.phases]
    together = "forward, backward and update"
    assert found == {True: [together], False: ["forward and update", "backward"]}


def test_a_saved_profile_goes_before_what_was_learned(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_profile().save(tmp_path / "hetero" / "profile.json")
    (made,) = steps.predictions.plans()
    assert made.computing.expected
    table = steps.predictions.explain()
    assert "the profile made up, for 1024 tokens per step until one was made" in table
    steps.make(streamed(steps, 1e4), 30.0, computing_s=6.0, count=4)
    (made,) = steps.predictions.plans()
    assert made.profile == make_profile()
    assert made.cost.busy_s["compute"] == pytest.approx(6.0)
    path = tmp_path / "hetero" / "profile.json"
    other_version = path.read_text().replace('"format": 2', '"format": 9')
    separate_profile().save(path)
    for content in (path.read_text(), other_version):
        path.write_text(content)
        (made,) = steps.predictions.plans()
        assert made.profile.name == "this training's own rates"


def test_a_disk_that_limits_steps_is_noted_once(steps: Steps) -> None:
    moved = streamed(steps, 1e4)
    assert moved.nvme_s > 30
    steps.make(moved, 1.2 * moved.nvme_s, computing_s=6.0, count=3)
    assert steps.notes == [], "too few to tell"
    steps.make(moved, 1.2 * moved.nvme_s, computing_s=6.0, count=5)
    (note,) = steps.notes
    assert note.startswith("the disk is the limit: ")
    assert f"{moved.nvme_s:.2g} s of {1.2 * moved.nvme_s:.2g} s per step" in note
    assert "one more GiB of host_memory is predicted to save" in note


@pytest.mark.parametrize(
    ("rate", "step_s", "computing_s"),
    [
        (1e4, 100.0, 90.0),  # computing takes longer
        (1e4, 1000.0, 6.0),  # most of the step is something else
        (1e8, 0.01, 0.001),  # nobody waits for it
    ],
)
def test_what_is_no_limit_is_not_noted(
    steps: Steps, rate: float, step_s: float, computing_s: float
) -> None:
    steps.make(streamed(steps, rate), step_s, computing_s, count=6)
    assert steps.notes == []


@pytest.mark.usefixtures("nothing_left")
def test_an_engine_counts_what_its_steps_move_and_update(tmp_path: Path) -> None:
    model, optimizer = build(
        placement_policy="nvme",
        dtype="bf16",
        chunk_numel=4096,
        nvme_path=str(tmp_path),
        host_memory="1MiB",
        debug={"overlap_updates": "none"},  # nothing is read ahead after the last step
    )
    engine = optimizer.engine
    before, traffic = counters_of(engine.chunk_groups, engine.backend), engine.traffic
    for tokens in batches(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.synchronize()
    moved = counters_of(engine.chunk_groups, engine.backend).since(before)
    now = engine.traffic
    read_written = now.disk_read - traffic.disk_read + now.disk_write - traffic.disk_write
    assert moved.nvme_bytes == read_written > 0
    numel = sum(p.numel() for p in model.parameters())
    assert moved.update_bytes == pytest.approx(3 * numel * BF16.update_bytes)
    assert moved.nvme_s > 0
    assert moved.update_s > 0
    (made,) = engine.plans
    assert made.group.placement == engine.placement
    assert "bound by" in engine.explain()
    engine.set_budget("2MiB")
    assert engine.plans == [], "other rates come with other homes"
    engine.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_chunk_group_that_comes_later_is_predicted_too(tmp_path: Path) -> None:
    model = tiny_gpt2()
    model.transformer.wte.requires_grad_(False)
    model, optimizer = hetero.initialize(
        model,
        hetero.HybridAdam(model.parameters()),
        placement_policy="auto",
        nvme_path=str(tmp_path),
        host_memory="3MiB",
        chunk_numel=4096,
    )
    model.transformer.wte.requires_grad_(True)
    for tokens in batches(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = optimizer.engine
    assert len(engine.chunk_groups) == len(engine.plans) == 2
    assert "OPTIM_STATE" in engine.explain()
    engine.close()
