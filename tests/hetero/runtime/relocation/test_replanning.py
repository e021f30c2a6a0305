"""Placements by plans: the first one, from a profile; and those after steps were traced."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.planning.search import plan
from hetero.planning.step_cost import CostModel
from hetero.planning.trace import Phase, Trace
from offload.disk.backing import FileBacking
from offload.errors import BudgetError
from offload.memory.process_memory import ResidentMemory
from offload.memory.tiers import Tier
from offload.profile.machine_profile import Profile
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import Run, batches, build, tiny_gpt2, train
from tests.support.training.planning import make_profile

pytestmark = pytest.mark.usefixtures("nothing_left")

DTYPES = ("bf16", "fp16", "fp32")
STEPS = 6


def profile(disk: float = 1e9, flop: float = 1e11, **more: Any) -> Profile:
    """A machine whose disk moves `disk` bytes and which makes `flop` operations per second."""
    return make_profile(
        dram_bytes_per_s=2e10,
        nvme_read_bytes_per_s=disk,
        nvme_write_bytes_per_s=disk,
        nvme_mixed_bytes_per_s=disk,
        update_bytes_per_s=dict.fromkeys(DTYPES, 1e10),
        matmul_flop_per_s=dict.fromkeys(DTYPES, flop),
        **more,
    )


# By it computing takes minutes, which hide what is moved meanwhile: gradients go to the disk, which
# is as slow. A step that was traced computes in no time, beside that, and adds to them often.
MISTAKEN = profile(disk=1e5, flop=1e5)


def start(path: Path, **options: Any) -> tuple[torch.nn.Module, hetero.HybridAdam]:
    given = {"placement_policy": "auto", "dtype": "bf16", "chunk_numel": 4096}
    given |= {"nvme_path": str(path), "host_memory": 1 << 20, "profile": profile()}
    return build(**{**given, **options})


def reference() -> Run:
    model, optimizer = build(placement_policy="cpu", dtype="bf16")
    return train(model, optimizer, batches(STEPS))


class TestFirstPlan:
    """initialize() takes the placement that plan() finds."""

    def test_it_is_the_plan_of_what_is_expected(self, tmp_path: Path) -> None:
        model, optimizer = start(tmp_path)
        engine = optimizer.engine
        (made,) = engine.plans
        assert made is not None
        assert made.placement == engine.placement
        assert made.problem.trace.expected
        assert plan(made.problem).placement == made.placement
        assert CostModel(made.problem).cost(made.placement).seconds == made.cost.seconds
        assert engine.notes == []
        table = engine.explain()
        assert "The step is bound by" in table
        assert "1024 tokens" in table
        assert train(model, optimizer, batches(STEPS)).same_bits(reference())

    def test_computing_is_that_of_the_tokens_that_are_expected(self, tmp_path: Path) -> None:
        seconds = []
        for tokens in (None, 1024, 2048):
            _, optimizer = start(tmp_path, expected_tokens=tokens)
            (made,) = optimizer.engine.plans
            seconds.append(made.problem.trace.forward_s)
            optimizer.engine.close()
        assert seconds[0] == seconds[1] == seconds[2] / 2

    def test_the_machine_decides(self, tmp_path: Path) -> None:
        """Where computing hides the disk, other kinds of state are in RAM than where it does
        not.
        """
        placed = []
        for machine in (MISTAKEN, profile(disk=1e5, flop=1e12)):
            _, optimizer = start(tmp_path, profile=machine, host_memory="400KiB")
            placed.append(optimizer.engine.placement)
            optimizer.engine.close()
        assert placed[0].param.count(Tier.HOST) < placed[1].param.count(Tier.HOST)
        assert placed[0].optim_state.count(Tier.HOST) > placed[1].optim_state.count(Tier.HOST)

    def test_a_saved_profile_is_found(
        self, tmp_path: Path, tmp_path_factory: Any, monkeypatch: Any
    ) -> None:
        cache = tmp_path_factory.mktemp("cache")
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        MISTAKEN.save(cache / "hetero" / "profile.json")
        for given in (None, str(cache / "hetero" / "profile.json"), MISTAKEN):
            _, optimizer = start(tmp_path, profile=given)
            assert Tier.DISK in optimizer.engine.placement.grad, given
            optimizer.engine.close()
        _, optimizer = start(tmp_path, profile=False)
        assert optimizer.engine.plans == [None]
        assert optimizer.engine.notes == []
        assert "no profile of this machine" in optimizer.engine.explain()
        optimizer.engine.close()

    def test_without_one_it_is_said_what_would_help(self, tmp_path: Path) -> None:
        _, optimizer = start(tmp_path, profile=None)
        (note,) = optimizer.engine.notes
        assert "hetero profile" in note
        optimizer.engine.close()
        _, optimizer = build(placement_policy="cpu")
        assert optimizer.engine.notes == [], "there is nothing to choose"
        optimizer.engine.close()

    def test_a_saved_one_of_another_version_is_a_note(
        self, tmp_path: Path, tmp_path_factory: Any, monkeypatch: Any
    ) -> None:
        cache = tmp_path_factory.mktemp("cache")
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        path = cache / "hetero" / "profile.json"
        profile().save(path)
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}))
        _, optimizer = start(tmp_path, profile=None)
        (note,) = optimizer.engine.notes
        assert "has format 9" in note
        optimizer.engine.close()

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("nowhere.json", "cannot read the profile nowhere.json"),
            (
                make_profile(
                    nvme_read_bytes_per_s=None,
                    nvme_write_bytes_per_s=None,
                    nvme_mixed_bytes_per_s=None,
                ),
                "says nothing about NVMe",
            ),
            (make_profile(matmul_flop_per_s={"fp16": 1.0}), "no matmul_flop_per_s for"),
        ],
    )
    def test_one_that_was_asked_for_and_is_of_no_use(
        self, tmp_path: Path, given: Any, said: str
    ) -> None:
        torch.manual_seed(0)
        model = tiny_gpt2()
        with pytest.raises(ValueError, match=said):
            hetero.initialize(
                model,
                hetero.HybridAdam(model.parameters()),
                placement_policy="auto",
                nvme_path=str(tmp_path),
                profile=given,
            )
        assert all(torch.isfinite(p).all() for p in model.parameters()), "it is as before"

    @pytest.mark.parametrize("value", [3, True, ["a.json"]])
    def test_what_is_no_profile_is_refused(self, value: Any) -> None:
        with pytest.raises(ValueError, match="profile must be"):
            hetero.Config(profile=value)
        with pytest.raises(ValueError, match="expected_tokens"):
            hetero.Config(expected_tokens=0)
        with pytest.raises(ValueError, match="process_memory"):
            hetero.Config(process_memory="some")

    def test_on_an_emulated_device(self, tmp_path: Path) -> None:
        model, optimizer = start(tmp_path, backend="emulated", device_memory="700KiB")
        (made,) = optimizer.engine.plans
        assert made.placement == optimizer.engine.placement
        assert made.problem.profile.h2d_bytes_per_s == 16e9
        assert train(model, optimizer, batches(STEPS)).same_bits(reference())

    def test_a_bank_that_comes_later(self, tmp_path: Path) -> None:
        model = tiny_gpt2()
        model.transformer.wte.requires_grad_(False)
        model, optimizer = hetero.initialize(
            model,
            hetero.HybridAdam(model.parameters()),
            placement_policy="auto",
            nvme_path=str(tmp_path),
            host_memory="3MiB",
            profile=profile(),
            chunk_numel=4096,
        )
        model.transformer.wte.requires_grad_(True)
        tokens = batches(1)[0]
        model(input_ids=tokens, labels=tokens).loss.backward()
        engine = optimizer.engine
        assert [each is not None for each in engine.plans] == [True, True]
        assert "OPTIM_STATE" in engine.explain()
        engine.close()


class TestTraces:
    """What steps are seen to do."""

    def test_training_and_evaluation_are_traces_of_their_own(self, tmp_path: Path) -> None:
        model, optimizer = start(tmp_path, host_memory="300KiB", profile=False)
        engine = optimizer.engine
        assert Tier.DISK in engine.placement.param
        for step in range(3):
            for tokens in batches(2, seed=step):
                optimizer.backward(model(input_ids=tokens, labels=tokens).loss / 2)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for tokens in batches(5):
                    model(input_ids=tokens)
        evaluations = [trace for trace in engine.replanner.traces if not trace.micro_batches]
        training = next(trace for trace in reversed(engine.replanner.traces) if trace.micro_batches)
        assert training.micro_batches == 2
        assert training.forward_s > 0
        assert training.backward_s > 0
        phases = [use.phase for use in training.uses]
        assert phases.count(Phase.FORWARD) + phases.count(Phase.BACKWARD) == len(phases)
        assert {use.chunk for use in training.uses if use.phase is Phase.BACKWARD}
        gathered = {c for c, tier in enumerate(engine.placement.param) if tier is Tier.DISK}
        assert {use.chunk for trace in evaluations for use in trace.uses} == gathered
        assert all(use.phase is Phase.FORWARD for trace in evaluations for use in trace.uses)
        engine.close()

    def test_memory_beside_the_state_is_seen(self, tmp_path: Path) -> None:
        model, optimizer = start(tmp_path, profile=False)
        kept: list[torch.Tensor] = []
        nbytes = 64 << 20

        def hook(*_: object) -> None:
            kept.append(torch.ones(nbytes, dtype=torch.uint8))

        peaks = []
        for tokens in batches(4):
            optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(optimizer.engine.replanner.traces[-1].peak().host_bytes)
            kept.clear()
            if len(peaks) == 3:
                model.transformer.h[1].register_forward_hook(hook)
        assert peaks[3] - peaks[2] > nbytes * 3 // 4
        optimizer.engine.close()

    def test_a_step_that_is_left_out_is_no_part_of_the_next(self, tmp_path: Path) -> None:
        """A GradScaler's: its gradients overflow."""
        model, optimizer = start(tmp_path, host_memory="300KiB", profile=False)
        engine = optimizer.engine
        for factor in (float("inf"), 1.0):
            tokens = batches(1)[0]
            model(input_ids=tokens, labels=tokens).loss.backward()
            members = engine.with_grads(model.parameters())
            assert engine.grad_factors.unscale(members, factor) == (factor != 1)
            if factor == 1:
                optimizer.step()
            optimizer.zero_grad()
        assert engine.replanner.traces[-1].micro_batches == 1
        engine.close()

    def test_inference_alone_keeps_nothing(self, tmp_path: Path) -> None:
        model, optimizer = start(tmp_path, profile=False)
        tracer = optimizer.engine.replanner.tracer
        with torch.no_grad():
            for _ in range(20):
                model(input_ids=batches(1)[0])
        assert tracer._recorder.moments == 0
        assert len(optimizer.engine.replanner.traces) == 1
        optimizer.engine.close()

    def test_seconds_of_computing_are_without_waits(self, tmp_path: Path, monkeypatch: Any) -> None:
        """Of a clock that only runs while transfers are waited for nothing is left."""
        model, optimizer = start(tmp_path, host_memory="300KiB", profile=False)
        engine = optimizer.engine
        now_s = [0.0]
        monkeypatch.setattr(engine.replanner.tracer._recorder, "clock", lambda: now_s[0])
        monkeypatch.setattr("offload.cache.slot_cache.time.perf_counter", lambda: now_s[0])
        read = FileBacking.read

        class Slow:
            def __init__(self, op: Any):
                self.op = op

            def wait(self) -> None:
                now_s[0] += 1.0
                self.op.wait()

            def cancel(self) -> None:
                self.op.cancel()

        monkeypatch.setattr(FileBacking, "read", lambda *given: Slow(read(*given)))
        for tokens in batches(2):
            optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        trace = engine.replanner.traces[-1]
        assert now_s[0] > 10
        assert (trace.forward_s, trace.backward_s) == (0.0, 0.0)
        engine.close()


class TestReplanning:
    """A plan from a traced step, carried out between steps."""

    def test_a_mistaken_first_plan_is_corrected(self, tmp_path: Path) -> None:
        model, optimizer = start(tmp_path, profile=MISTAKEN)
        engine = optimizer.engine
        first = engine.placement
        assert Tier.DISK in first.grad
        run = train(model, optimizer, batches(4 * 4), accumulate=4)
        (change,) = engine.replanner.changes
        assert change.step == 2
        assert change.after_s < 0.95 * change.before_s
        assert change.moved_bytes > 0
        assert Tier.DISK not in engine.placement.grad
        assert any("after step 2" in note for note in engine.notes)
        assert engine.ledger.peak_bytes["host"] <= 1 << 20
        expected = train(*build(placement_policy="cpu", dtype="bf16"), batches(4 * 4), accumulate=4)
        assert run.same_bits(expected)

    def test_a_good_plan_stays_and_is_explained_by_what_was_measured(self, tmp_path: Path) -> None:
        model, optimizer = start(tmp_path, profile=profile(disk=1e5, flop=1e12))
        engine = optimizer.engine
        first = engine.placement
        for tokens in batches(4):
            optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        assert engine.replanner.changes == []
        assert engine.placement == first
        (made,) = engine.plans
        assert not made.problem.trace.expected
        assert "is estimated" not in engine.explain()
        engine.close()

    def test_what_is_in_use_moves_later(self, tmp_path: Path) -> None:
        model, optimizer = start(tmp_path, profile=MISTAKEN)
        engine = optimizer.engine
        for number in range(4):
            for tokens in batches(4):
                optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
            with ExitStack() as held:
                if number == 1:
                    held.enter_context(hetero.gathered(model.parameters()))
                optimizer.step()
            optimizer.zero_grad()
            assert [change.step for change in engine.replanner.changes] == [4] * (number == 3)
        engine.close()

    def test_another_kind_of_step_is_planned_for_when_it_comes_again(self, tmp_path: Path) -> None:
        """From a step on gradients are added to four times, which is no place for a slow disk."""
        model, optimizer = start(tmp_path, profile=profile(disk=1e5, flop=1e5))
        engine = optimizer.engine
        engine.replanner._next_look = 1 << 30
        data = iter(batches(40))

        def step(micro_batches: int) -> None:
            for _ in range(micro_batches):
                tokens = next(data)
                optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()

        step(1)
        engine.replanner._next_look = 2
        # As if computing were as slow as the profile says.
        engine.replanner.tracer.traces.note = slowly(engine.replanner.tracer.traces.note)  # type: ignore
        step(1)
        step(1)
        assert Tier.DISK in engine.placement.grad
        assert engine.replanner.changes == []
        for number in range(4):
            step(4)
            assert number or not engine.replanner.changes, "once may be an exception"
        assert len(engine.replanner.changes) == 1
        assert Tier.DISK not in engine.placement.grad
        engine.close()

    def test_what_cannot_be_written_is_a_note(self, tmp_path: Path, monkeypatch: Any) -> None:
        """An error would say that the step, which was made, is to be made again."""
        model, optimizer = start(tmp_path, profile=MISTAKEN)
        engine = optimizer.engine
        placed = engine.placement

        def full(_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("hetero.runtime.relocation.relocate.Migration.prepare", full)
        run = train(model, optimizer, batches(4 * 4), accumulate=4)
        assert engine.placement == placed
        assert engine.replanner.changes == []
        assert sum("could not move" in note for note in engine.notes) == 1
        expected = train(*build(placement_policy="cpu", dtype="bf16"), batches(4 * 4), accumulate=4)
        assert run.same_bits(expected)

    @pytest.mark.parametrize("stage", [2, 3])
    def test_ranks_change_together(self, stage: int, ranks2: RankPool, tmp_path: Path) -> None:
        found = ranks2.run(on_ranks, str(tmp_path), stage)
        assert found[0][0] == found[1][0], "placements"
        assert found[0][2] == found[1][2], "changes"
        if stage == 3:
            assert found[0][2]
        plain = ranks2.run(on_ranks, str(tmp_path), stage, False)
        for mine, theirs in zip(plain, found, strict=True):
            assert all(map(torch.equal, mine[1], theirs[1]))


def undecided(rank: int, world: int, path: str, reluctant: int) -> tuple[Any, list[Any], list[int]]:
    """One rank finds the gain too small."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == reluctant:
            patch.setattr("hetero.runtime.relocation.replanner._LEAST_GAIN", 2.0)
        return on_ranks(rank, world, path, 3)


@pytest.mark.parametrize("reluctant", [0, 1])
def test_ranks_change_only_if_all_gain(reluctant: int, ranks2: RankPool, tmp_path: Path) -> None:
    found = ranks2.run(undecided, str(tmp_path), reluctant)
    assert [changes for _, _, changes in found] == [[], []]
    plain = ranks2.run(on_ranks, str(tmp_path), 3, False)
    for mine, theirs in zip(plain, found, strict=True):
        assert all(map(torch.equal, mine[1], theirs[1]))


def with_spare_copies(rank: int, world: int, path: str) -> tuple[int, int, int, bool]:
    """One rank alone has gathered all parameters, in RAM that is nobody's, when it becomes less."""
    model, optimizer = start(
        Path(path), zero_stage=3, rank_timeout_s=60.0, host_memory="8MiB", profile=False
    )
    engine = optimizer.engine
    planned, placed = engine.placement.host_bytes, engine.placement
    if rank == 0:
        with hetero.gathered(list(model.parameters())):
            pass
    before = engine.ledger.in_use_bytes["host"]
    engine.set_budget(planned)
    after = engine.ledger.in_use_bytes["host"]
    same = engine.placement == placed
    for tokens in batches(2, seed=rank):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.ledger.budget_bytes["host"] == planned
    engine.close()
    return planned, before, after, same


def test_spare_copies_of_one_rank_give_way_to_a_budget(ranks2: RankPool, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks2.run(with_spare_copies, str(tmp_path))):
        planned, before, after, same = found
        assert same, "nothing else has to move"
        assert (before > planned) == (rank == 0)
        assert after <= planned


def limited(rank: int, world: int, path: str) -> tuple[int, str, int]:
    """Only one rank's system has a limit, and only its process passes it."""
    with pytest.MonkeyPatch.context() as patch:
        process = Process(patch)
        patch.setattr("hetero.config.allowed_bytes", lambda: (64 << 20) if rank else None)
        model, optimizer = start(
            Path(path), zero_stage=3, rank_timeout_s=60.0, process_memory="auto", host_memory="4MiB"
        )
        engine = process.engine = optimizer.engine
        for step in range(4):
            process.beside_bytes = (31 << 20) if rank and step == 1 else 0
            tokens = batches(1, seed=rank + 10 * step)[0]
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert Tier.HOST in engine.replanner.limits
        found = engine.replanner.limits[Tier.HOST].limit, repr(engine.placement)
        budget = engine.ledger.budget_bytes["host"]
        engine.close()
        return *found, budget


def test_a_limit_of_one_rank_is_that_of_all(ranks2: RankPool, tmp_path: Path) -> None:
    one, other = ranks2.run(limited, str(tmp_path))
    assert one == other
    assert one[0] == 32 << 20
    assert one[2] < 1 << 20


def slowly(note: Any) -> Any:
    """Notes traces whose steps of one micro-batch compute for minutes."""

    def noting(trace: Trace) -> Any:
        seconds = 3600.0 if trace.micro_batches == 1 else 1.0
        return note(replace(trace, forward_s=seconds, backward_s=seconds))

    return noting


def on_ranks(
    rank: int, world: int, path: str, stage: int, planned: bool = True
) -> tuple[Any, list[torch.Tensor], list[int]]:
    model, optimizer = start(
        Path(path),
        zero_stage=stage,
        rank_timeout_s=60.0,
        chunk_numel=8192,
        host_memory="600KiB" if stage == 3 else "2MiB",
        profile=MISTAKEN if planned else False,
    )
    engine = optimizer.engine
    losses = []
    for step in range(4):
        for tokens in batches(3, seed=rank + 10 * step):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.detach())
            del loss
        optimizer.step()
        optimizer.zero_grad()
    placed, changes = repr(engine.placement), [c.step for c in engine.replanner.changes]
    found = [*losses, *hetero.masters(model.parameters())]
    engine.close()
    return placed, found, changes


class Process:
    """A process of which a test says how much it holds beside the model state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.beside_bytes = 0
        self.engine: Any = None
        monkeypatch.setattr(ResidentMemory, "nbytes", lambda _: self.nbytes())
        monkeypatch.setattr("hetero.config.resident_bytes", self.nbytes)

    def nbytes(self) -> int:
        managed = (
            0
            if self.engine is None
            else sum(self.engine.ledger.in_use_bytes[tier] for tier in ("host", "device"))
        )
        return self.beside_bytes + managed


REAL = """
import json, sys
import torch, hetero
from offload.memory.process_memory import resident_bytes
from tests.support.training.loops import batches, tiny_gpt2

torch.set_num_threads(1)
limit = resident_bytes() + (220 << 20)
options = {"placement_policy": "auto", "nvme_path": sys.argv[1], "process_memory": limit}
with hetero.ZeroInitContext(profile=False, **options):
    model = tiny_gpt2(384, 6)
model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
over = []
for step, tokens in enumerate(batches(6)):
    loss = model(input_ids=tokens, labels=tokens).loss
    kept = torch.ones(60 << 20 if step >= 2 else 1, dtype=torch.uint8)
    loss.backward()
    over.append(resident_bytes() > limit)
    del loss, kept
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps([over, [change.step for change in optimizer.engine.replanner.changes]]))
optimizer.engine.close()
"""


def test_a_process_gives_way_to_itself(tmp_path: Path) -> None:
    """Activations grow by 60 MiB in the third step; from the fourth on all fits again."""
    root = Path(__file__).parents[4]
    out = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    over, steps = json.loads(out.stdout)
    assert steps[-1] == 3, (over, steps)
    assert over[2]
    assert not any(over[3:])


class TestProcessMemory:
    """The limit of the whole process: model state gives way."""

    LIMIT = 16 << 20

    @pytest.fixture
    def process(self, monkeypatch: pytest.MonkeyPatch) -> Process:
        return Process(monkeypatch)

    def start(self, process: Process, path: Path, **options: Any) -> Any:
        options = {"profile": False, "host_memory": None, **options}
        model, optimizer = start(path, process_memory=self.LIMIT, **options)
        process.engine = optimizer.engine
        return model, optimizer

    def step(self, model: Any, optimizer: Any, number: int) -> None:
        tokens = batches(STEPS)[number]
        optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()

    @pytest.mark.parametrize("backend", ["cpu", "emulated"])
    def test_state_gives_way_and_bits_are_the_same(
        self, process: Process, tmp_path: Path, backend: str
    ) -> None:
        more = {"backend": "emulated", "device_memory": "400KiB"} if backend != "cpu" else {}
        model, optimizer = self.start(process, tmp_path, **more)
        engine = optimizer.engine
        used = []
        losses = []
        for number, beside in enumerate([0, 13, 14, 14, 15, 14]):
            process.beside_bytes = beside << 20
            tokens = batches(STEPS)[number]
            loss = model(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            optimizer.backward(loss)
            del loss
            optimizer.step()
            optimizer.zero_grad()
            used.append(engine.ledger.in_use_bytes["host"])
            assert process.nbytes() <= self.LIMIT
        assert used[0] >= used[1] > used[2] == used[3] > used[4] == used[5]
        assert losses == reference().losses
        steps = [change.step for change in engine.replanner.changes]
        assert steps in ([2, 3, 5], [3, 5])
        assert all(
            "beside the model state" in change.words() for change in engine.replanner.changes
        )
        engine.close()

    def test_small_changes_do_not_move_it_to_and_fro(
        self, process: Process, tmp_path: Path
    ) -> None:
        model, optimizer = self.start(process, tmp_path)
        process.beside_bytes = 14 << 20
        for number in range(STEPS):
            self.step(model, optimizer, number)
            process.beside_bytes += (-1) ** number * (100 << 10)
        assert len(optimizer.engine.replanner.changes) == 1
        optimizer.engine.close()

    def test_what_cannot_fit_is_refused_with_the_numbers(
        self, process: Process, tmp_path: Path
    ) -> None:
        model, optimizer = self.start(process, tmp_path)
        self.step(model, optimizer, 0)
        process.beside_bytes = self.LIMIT - (64 << 10)
        with pytest.raises(BudgetError, match=r"process_memory is 16.0 MiB .* raise") as error:
            self.step(model, optimizer, 1)
        assert "beside the model state" in str(error.value)
        assert "this step was made" in str(error.value)
        optimizer.engine.close()

    def test_the_first_step_is_left_room(self, process: Process, tmp_path: Path) -> None:
        process.beside_bytes = 12 << 20
        _, optimizer = self.start(process, tmp_path)
        assert optimizer.engine.ledger.budget_bytes["host"] == 3 << 20
        optimizer.engine.close()

    def test_a_user_s_budget_is_not_raised(self, process: Process, tmp_path: Path) -> None:
        process.beside_bytes = self.LIMIT - (1 << 20)
        model, optimizer = self.start(
            process, tmp_path, profile=profile(disk=1e4), host_memory="8MiB"
        )
        engine = optimizer.engine
        process.beside_bytes = 0
        engine.set_budget("700KiB")
        for number in range(3):
            self.step(model, optimizer, number)
        assert engine.ledger.budget_bytes["host"] == 700 << 10
        engine.close()

    def test_what_was_left_is_used_when_steps_were_seen(
        self, process: Process, tmp_path: Path
    ) -> None:
        process.beside_bytes = self.LIMIT - (1 << 20)
        model, optimizer = self.start(
            process, tmp_path, profile=profile(disk=1e4), host_memory="8MiB"
        )
        engine = optimizer.engine
        assert engine.ledger.budget_bytes["host"] == 768 << 10
        process.beside_bytes = 0
        for number in range(3):
            self.step(model, optimizer, number)
        assert engine.ledger.budget_bytes["host"] == 8 << 20
        assert set(engine.placement.optim_state) == {Tier.HOST}
        engine.close()
