"""What ranks do together, each alone, and when one of them fails."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import rank_training
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import build, same, tiny_gpt2

TIGHT = {"placement_policy": "nvme", "host_memory": "900KiB", "chunk_numel": 16384}


class TestConstruction:
    def plain(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [p.detach() for p in tiny_gpt2().parameters()]

    @pytest.mark.covering(1)
    @pytest.mark.parametrize("host_memory", ["64MiB", "1504KiB"])
    @pytest.mark.parametrize("seed_by_rank", [False, True])
    def test_values_are_those_of_plain_construction(
        self, ranks2: RankPool, host_memory: str, seed_by_rank: bool
    ) -> None:
        chosen = {"host_memory": host_memory, "dtype": "bf16", "chunk_numel": 8192}
        found = ranks2.run(rank_training.construct, chosen, seed_by_rank)
        for one in found:
            assert same(one["masters"], self.plain())
            assert one["peak"] <= 1504 << 10 or host_memory == "64MiB"
        # Outside the block each rank's random numbers are its own.
        assert (found[0]["drawn"] != found[1]["drawn"]) == seed_by_rank

    def test_construction_passes_no_budget_on_disk(self, ranks2: RankPool, tmp_path: Path) -> None:
        chosen = TIGHT | {"nvme_path": str(tmp_path)}
        for one in ranks2.run(rank_training.construct, chosen, False):
            assert same(one["masters"], self.plain())
            assert one["peak"] <= 900 << 10

    @pytest.mark.parametrize("modifier", [0, 1])
    def test_uses_while_each_rank_keeps_a_part(
        self, ranks2: RankPool, tmp_path: Path, modifier: int
    ) -> None:
        chosen = TIGHT | {"nvme_path": str(tmp_path)}
        found = ranks2.run(rank_training.under_construction, chosen, modifier)
        assert same(found[0]["masters"], found[1]["masters"])
        for one in found:
            changed = [
                index
                for index, (mine, theirs) in enumerate(
                    zip(one["masters"], self.plain(), strict=True)
                )
                if not torch.equal(mine, theirs)
            ]
            assert len(changed) == 1
            assert bool((one["masters"][changed[0]] == 10.0 + modifier).all())
            assert one["copied"]
            assert len(one["refusals"]) == 2
            assert all(
                "ZeroInitContext and hetero.initialize()" in text for text in one["refusals"]
            )
            assert one["peak"] <= 900 << 10

    def test_a_model_from_outside_starts_as_on_the_first_rank(self, ranks2: RankPool) -> None:
        found = ranks2.run(rank_training.outside, {})
        assert same(found[0], found[1])
        torch.manual_seed(0)
        first = rank_training.Experts(2)
        assert same(found[1][:-1], [p.detach() for p in first.parameters()])
        assert torch.equal(found[1][-1], torch.zeros(3))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.extra), 3])
def test_one_rank_alone_reads_and_generates(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    where = TIGHT | {"nvme_path": str(tmp_path)} if stage == 3 else {}
    found = ranks2.run(rank_training.one_sided, {"zero_stage": stage, **where})
    state = found[0]["state"]
    assert list(state) == list(tiny_gpt2().state_dict())
    names = dict(tiny_gpt2().named_parameters())
    for name, master in zip(names, found[0]["masters"], strict=True):
        assert torch.equal(state[name], master), name  # fp32: they are the same
    assert torch.equal(found[0]["wte"], state["transformer.wte.weight"])
    assert found[0]["many"].shape[1] == 4 + 3
    assert found[1]["many"].shape[1] == 4 + 7
    # What rank 0 saved alone, one process and other stages load.
    saved = (state, found[0]["optimizer"])
    again = ranks2.run(rank_training.load, {"zero_stage": 4 - stage}, *saved)
    model, optimizer = build(placement_policy="cpu", dtype="fp32")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    tokens = rank_training.batches(2)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert same(again[0], again[1])
    for mine, theirs in zip(
        again[0], rank_training.hetero.masters(list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    optimizer.engine.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("modifier", [0, 1])
def test_one_ranks_change_is_everybodys(ranks2: RankPool, stage: int, modifier: int) -> None:
    found = ranks2.run(rank_training.modified, {"zero_stage": stage}, modifier)
    assert same(found[0], found[1])
    assert torch.equal(found[0][0], torch.full((64, 64), 10.0 + modifier))


def test_two_models_and_a_part_of_the_ranks(ranks4: RankPool) -> None:
    found = ranks4.run(rank_training.two_models, {})
    for other in found[1:]:
        for mine, theirs in zip(found[0][:2], other[:2], strict=True):
            assert same(mine, theirs)
    assert same(found[0][2], found[1][2])
    assert len(found[2]) == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_the_smallest_budget_is_enough_in_any_order_of_use(ranks2: RankPool, stage: int) -> None:
    found = ranks2.run(rank_training.tight_use_order, {"zero_stage": stage})
    assert same(found[0]["masters"], found[1]["masters"])
    assert all(one["peak"] <= one["smallest"] for one in found)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_without_data_gives_zeros(ranks2: RankPool, stage: int) -> None:
    found = ranks2.run(rank_training.unequal, {"zero_stage": stage})
    assert same(found[0], found[1])


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_made_zero_becomes_the_mean_also_where_none_comes(
    ranks2: RankPool, stage: int
) -> None:
    torch.manual_seed(0)
    model = rank_training.Experts(4)
    expected = []
    for step in range(4):
        for rank in range(2 if step < 3 else 1):
            x = rank_training.inputs(rank, step)
            (model(x, rank if step else 0).square().mean() / 2).backward()
        grads = [p.grad for p in model.parameters()]
        expected.append([None if g is None else g.clone() for g in grads])
        model.zero_grad(set_to_none=False)
    for found in ranks2.run(rank_training.zeroing, {"zero_stage": stage}):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("expert", "options"),
    [(1, {}), (3, {"chunk_numel": 8192})],  # whose chunk is sent at the end, or the first one
)
@pytest.mark.parametrize("stage", [1, 3])
def test_assigned_gradients_are_averaged_where_one_rank_had_others(
    ranks2: RankPool, stage: int, expert: int, options: dict[str, Any]
) -> None:
    for found in ranks2.run(rank_training.assigned, {"zero_stage": stage, **options}, expert):
        for grad in found:
            assert grad is not None
            assert torch.equal(grad, torch.full_like(grad, 2.0))


@pytest.mark.parametrize("calls", [(1, 2), (0, 2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_assigned_gradients_are_averaged_or_refused_after_unequal_backward_calls(
    ranks2: RankPool, stage: int, calls: tuple[int, int]
) -> None:
    options = {"zero_stage": stage}
    for found in ranks2.run(rank_training.assigned_after_unequal, options, calls):
        if stage == 1:  # nothing was sent before
            assert all(torch.equal(grad, torch.full_like(grad, 2.0)) for grad in found)
        else:
            assert "was cleared on one rank" in found


def plain_experts(uses: Iterable[tuple[int, int]], factor: float) -> rank_training.Experts:
    """A model with the gradients of (rank, micro-batch), each of that rank's expert."""
    torch.manual_seed(0)
    model = rank_training.Experts(4)
    for rank, micro in uses:
        (model(rank_training.inputs(rank, micro), rank).square().mean() * factor).backward()
    return model


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_assigned_on_one_rank_is_averaged_with_what_anothers_backward_gives(
    ranks2: RankPool, stage: int, calls: int
) -> None:
    plain = plain_experts([(1, micro) for micro in range(calls)], 0.5)
    expected = [p.grad + 1.5 for p in plain.experts[1].parameters()]
    options = {"zero_stage": stage}
    for found in ranks2.run(rank_training.assigned_beside_backward, options, calls):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_assigned_gradients_and_those_of_a_scaled_loss_are_added(
    ranks2: RankPool, stage: int
) -> None:
    plain = plain_experts([(rank, 0) for rank in (0, 1)], 1.0)
    expected = [
        torch.full_like(p, 0.25) if p.grad is None else p.grad + 0.25 for p in plain.parameters()
    ]
    for found in ranks2.run(rank_training.assigned_before_scaled, {"zero_stage": stage}):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_a_refused_step(ranks2: RankPool, stage: int) -> None:
    found = ranks2.run(rank_training.refused_step, {"zero_stage": stage})
    assert same(found[0], found[1])


PLACES = ("construction", "forward", "backward", "clipping", "step", "state_dict", "close")
ALWAYS = (("die", "backward", 3),)


class TestFailure:
    def check(self, how: str, where: str, options: dict[str, Any], path: Path, world: int) -> None:
        chosen = TIGHT | {"nvme_path": str(path)} if options["zero_stage"] == 3 else {}
        with RankPool(world) as ranks:
            outcomes = ranks.run_to_the_end(rank_training.failing, chosen | options, how, where)
        *others, bad = outcomes
        if how == "die":
            assert bad.failure == "died with exit code 7"
        else:
            assert bad.failure is not None
            assert "the bad rank's own error" in bad.failure
        for one in others:
            assert one.failure is None, one.failure
            found = one.result
            # A rank that stays in the middle of things only serves: what others need of it
            # alone they may have until it is gone.
            if found["error"] is not None:
                assert f"rank {world - 1} " in found["error"], found
                assert "imed out" not in found["error"], found
            else:
                assert where in ("state_dict", "close"), found
            # Less than the time after which they would give up a rank that only hangs.
            limit_s = 3 * rank_training.HANG_TIMEOUT_S
            if how != "hang":
                limit_s = rank_training.PATIENT_TIMEOUT_S
            assert found["seconds"] < limit_s, found
            assert found.get("closing", 0.0) < limit_s, found
            # A rank that never came is listened to on the default process group, until it is gone.
            listening = how == "hang" and where == "construction"
            hung = {f"hetero-meeting-{world - 1}"} if listening else set()
            assert set(found["threads"]) <= hung, found
            assert not found["files"], found
        assert not list(path.iterdir())

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("how", "where", "stage"),
        [
            pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.extra)
            for case in product(("die", "raise", "hang"), PLACES, (1, 3))
        ],
    )
    def test_a_rank_that_fails_is_named_in_time(
        self, how: str, where: str, stage: int, tmp_path: Path
    ) -> None:
        self.check(how, where, {"zero_stage": stage}, tmp_path, 3 if stage == 3 else 2)

    @pytest.mark.parametrize("what", ["model", "option", "gradient", "load"])
    def test_ranks_that_do_not_do_the_same_are_told(self, ranks2: RankPool, what: str) -> None:
        # Only of "load" a rank hears nothing, since the other one does not come.
        timeout_s = 10.0 if what == "load" else 60.0
        found: list[Any] = ranks2.run(rank_training.different, {"rank_timeout_s": timeout_s}, what)
        assert what == "load" or all("Error: " in one for one in found), found
        named = {
            "model": "experts.2.weight",
            "option": "chunk_numel",
            "gradient": "inner.weight",
            "load": "changing inner.weight",
        }
        assert any(named[what] in one for one in found), found


def test_torchs_default_device_has_no_say(ranks2: RankPool, tmp_path: Path) -> None:
    """(No rank could read a tensor on meta, and none could send it.)"""
    chosen = TIGHT | {"nvme_path": str(tmp_path)}
    plain, found = (
        ranks2.run(rank_training.train_with_default_device, chosen, device)
        for device in (None, "meta")
    )
    assert all(map(same, plain, found))
