"""hetero/runtime/relocation: state gives way to limits of processes and ranks."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.planning.placement import PlacementError
from offload.errors import BudgetError
from offload.memory.process_memory import resident_bytes
from offload.memory.tiers import Tier
from tests.support.process_limits import Process
from tests.support.ranks.processes import RankPool, run_forked
from tests.support.training.loops import Run, batches, build, tiny_gpt2, train

pytestmark = pytest.mark.usefixtures("nothing_left")

DTYPES = ("bf16", "fp16", "fp32")
STEPS = 6


def start(path: Path, **options: Any) -> tuple[torch.nn.Module, hetero.HybridAdam]:
    given = {"placement_policy": "auto", "dtype": "bf16", "chunk_numel": 4096}
    given |= {"nvme_path": str(path), "host_memory": 1 << 20}
    return build(**{**given, **options})


def reference() -> Run:
    model, optimizer = build(placement_policy="cpu", dtype="bf16")
    return train(model, optimizer, batches(STEPS))


def with_spare_copies(rank: int, world: int, path: str) -> tuple[int, int, int, bool]:
    """One rank alone has gathered all parameters, in RAM that is nobody's, when it becomes less."""
    model, optimizer = start(Path(path), zero_stage=3, rank_timeout_s=60.0, host_memory="8MiB")
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
        assert Tier.HOST in engine.watch.budget_moves.limits
        found = engine.watch.budget_moves.limits[Tier.HOST].limit, repr(engine.placement)
        budget = engine.ledger.budget_bytes["host"]
        engine.close()
        return *found, budget


def with_a_limit_of_one(rank: int, world: int, path: str) -> tuple[str, int | None]:
    """Only one rank's system has a limit, before a step was made."""
    with pytest.MonkeyPatch.context() as patch:
        limit = 2 * (1 << 20) if rank else None
        patch.setattr("hetero.config.allowed_bytes", lambda: limit)
        patch.setattr("hetero.setup.process_share.resident_bytes", lambda: 0)
        _, optimizer = start(Path(path), rank_timeout_s=60.0, process_memory="auto")
        engine = optimizer.engine
        found = repr(engine.placement), engine.ledger.budget_bytes["host"]
        engine.close()
        return found


def test_first_budgets_are_the_least_of_all_ranks(ranks2: RankPool, tmp_path: Path) -> None:
    """What only one rank leaves for steps is left by all, or their placements would differ."""
    one, other = ranks2.run(with_a_limit_of_one, str(tmp_path))
    assert one == other
    assert one[1] == 512 << 10


def test_a_limit_of_one_rank_is_that_of_all(ranks2: RankPool, tmp_path: Path) -> None:
    one, other = ranks2.run(limited, str(tmp_path))
    assert one == other
    assert one[0] == 32 << 20
    assert one[2] <= 1 << 20


def grow_in_the_third_step(path: str) -> tuple[list[bool], list[int], list[str]]:
    """By step whether this process holds more than its limit; steps of changes, and notes."""
    torch.set_num_threads(1)
    train(*build(placement_policy="nvme", nvme_path=path), batches(1))  # all code is in memory
    limit = resident_bytes() + (105 << 20)
    options = {"placement_policy": "auto", "nvme_path": path, "process_memory": limit}
    model, optimizer = build(lambda: tiny_gpt2(256, 6), **options)
    over = []
    for step, tokens in enumerate(batches(6)):
        loss = model(input_ids=tokens, labels=tokens).loss
        kept = torch.ones(50 << 20 if step >= 2 else 1, dtype=torch.uint8)
        loss.backward()
        over.append(resident_bytes() > limit)
        del loss, kept
        optimizer.step()
        optimizer.zero_grad()
    engine = optimizer.engine
    found = over, [change.step for change in engine.changes], engine.notes
    engine.close()
    return found


def test_a_process_gives_way_to_itself(tmp_path: Path) -> None:
    """Activations grow by 50 MiB in the third step, which is said; from the fourth on all fits
    again."""
    over, steps, notes = run_forked(grow_in_the_third_step, str(tmp_path))
    assert steps[-1] == 3, (over, steps)
    assert any("passed process_memory in step 3" in note and "raise" in note for note in notes)
    assert over[2]
    assert not any(over[3:])


class TestProcessMemory:
    """The limit of the whole process: model state gives way."""

    LIMIT = 16 << 20

    def start(self, process: Process, path: Path, **options: Any) -> Any:
        options = {"host_memory": None, **options}
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
        most_kib = 15900 if backend == "cpu" else 15700  # (the emulated device is RAM)
        for number, beside_kib in enumerate([0, 13 << 10, 14 << 10, 14 << 10, most_kib, 14 << 10]):
            process.beside_bytes = beside_kib << 10
            tokens = batches(STEPS)[number]
            loss = model(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            optimizer.backward(loss)
            del loss
            optimizer.step()
            optimizer.zero_grad()
            used.append(engine.ledger.in_use_bytes["host"])
            assert process.nbytes() <= self.LIMIT
        assert used[0] > used[-1]
        assert used == sorted(used, reverse=True)
        assert losses == reference().losses
        steps = [change.step for change in engine.changes]
        assert steps
        assert all("for more than model state" in change.words() for change in engine.changes)
        engine.close()

    def test_small_changes_do_not_move_it_to_and_fro(
        self, process: Process, tmp_path: Path
    ) -> None:
        model, optimizer = self.start(process, tmp_path)
        process.beside_bytes = 14 << 20
        for number in range(STEPS):
            self.step(model, optimizer, number)
            process.beside_bytes += (-1) ** number * (100 << 10)
        assert len(optimizer.engine.changes) == 1
        optimizer.engine.close()

    def test_what_cannot_fit_is_refused_with_the_numbers(
        self, process: Process, tmp_path: Path
    ) -> None:
        model, optimizer = self.start(process, tmp_path)
        self.step(model, optimizer, 0)
        process.beside_bytes = self.LIMIT - (64 << 10)
        with pytest.raises(BudgetError, match=r"process_memory is 16.0 MiB .* raise") as error:
            self.step(model, optimizer, 1)
        assert "for activations, temporaries" in str(error.value)
        assert "this step was made" in str(error.value)
        optimizer.engine.close()

    def test_the_first_step_is_left_room(self, process: Process, tmp_path: Path) -> None:
        """Where host_memory is what limits state, enough is left for steps anyway."""
        for beside_bytes, host_memory, left in ((12 << 20, None, 2 << 20), (0, "4MiB", 4 << 20)):
            process.beside_bytes = beside_bytes
            _, optimizer = self.start(process, tmp_path, host_memory=host_memory)
            assert optimizer.engine.ledger.budget_bytes["host"] == left
            optimizer.engine.close()
            process.engine = None

    def test_a_user_s_budget_is_not_raised(self, process: Process, tmp_path: Path) -> None:
        process.beside_bytes = self.LIMIT - (1 << 20)
        model, optimizer = self.start(process, tmp_path, host_memory="8MiB")
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
        model, optimizer = self.start(process, tmp_path, host_memory="8MiB")
        engine = optimizer.engine
        assert engine.ledger.budget_bytes["host"] == 512 << 10
        process.beside_bytes = 0
        for number in range(3):
            self.step(model, optimizer, number)
        assert engine.ledger.budget_bytes["host"] == 8 << 20
        assert set(engine.placement.optim_state) == {Tier.HOST}
        engine.close()

    def test_what_has_no_placement_with_more_of_one_budget_stays(
        self, process: Process, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """The step was made: no error may tell the user to make it again."""
        process.beside_bytes = self.LIMIT - (1 << 20)
        model, optimizer = self.start(process, tmp_path, host_memory="8MiB")
        engine = optimizer.engine
        process.beside_bytes = 0
        placed = engine.placement

        def refuse(*_: Any) -> None:
            raise PlacementError("nothing fits", 1)

        monkeypatch.setattr("hetero.runtime.relocation.place_groups", refuse)
        for number in range(3):
            self.step(model, optimizer, number)
        assert engine.placement == placed
        assert engine.ledger.budget_bytes["host"] == 512 << 10
        assert engine.changes == []
        engine.close()

    def test_what_is_in_use_moves_later(self, process: Process, tmp_path: Path) -> None:
        process.beside_bytes = self.LIMIT - (2 << 20)
        model, optimizer = self.start(process, tmp_path, host_memory="8MiB")
        engine = optimizer.engine
        process.beside_bytes = 0
        for number in range(4):
            tokens = batches(STEPS)[number]
            optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
            with ExitStack() as held:
                if number == 1:
                    held.enter_context(hetero.gathered(model.parameters()))
                optimizer.step()
            optimizer.zero_grad()
            assert [change.step for change in engine.changes] == [3] * (number >= 2)
        engine.close()

    def test_what_cannot_be_written_is_a_note(
        self, process: Process, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """An error would say that the step, which was made, is to be made again."""
        model, optimizer = self.start(process, tmp_path)
        engine = optimizer.engine
        placed = engine.placement
        process.beside_bytes = self.LIMIT - (1 << 20)

        def full(_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("hetero.runtime.relocation.Migration.prepare", full)
        for number in range(3):
            self.step(model, optimizer, number)
        assert engine.placement == placed
        assert engine.changes == []
        assert sum("could not move" in note for note in engine.notes) == 1
        engine.close()

    def test_a_limit_that_is_no_size_is_refused(self) -> None:
        with pytest.raises(ValueError, match="process_memory"):
            hetero.Config(process_memory="some")
