"""Parameters that come later: what may go wrong on the way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
import hetero.setup.first_values
from tests.support.ranks import chunk_group_ranks as chunk_group_ranks
from tests.support.ranks.processes import RankPool
from tests.support.training.chunk_group_training import Mixed, build, inputs, loss_of


def managed(model: nn.Module, **options: Any) -> tuple[nn.Module, hetero.HybridAdam]:
    return hetero.initialize(
        model, hetero.HybridAdam(model.parameters(), lr=1e-2),
        **{"placement_policy": "cpu"} | options,
    )  # fmt: skip


# Ranks


@pytest.mark.parametrize(("frozen", "fewer"), [(False, False), (True, False), (True, True)])
def test_ranks_that_add_other_parameters(ranks2: RankPool, frozen: bool, fewer: bool) -> None:
    """The same ones in another order, or fewer."""
    for error in ranks2.run(chunk_group_ranks.twins, frozen, fewer):
        assert re.search(r"1 chunk groups: .*differ between ranks: number \d .*extra\.[ab]", error)


@pytest.mark.parametrize("stage", [2, 3])
def test_unfreezing_inside_no_sync(ranks2: RankPool, stage: int) -> None:
    first, second = ranks2.run(chunk_group_ranks.inside_no_sync, stage)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_is_done_sends_what_others_need_for_their_backward(
    ranks2: RankPool, stage: int
) -> None:
    ranks2.run(chunk_group_ranks.other_modules_of_what_came_later, stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_unfreezing_between_micro_batches_of_ranks(ranks2: RankPool, stage: int) -> None:
    ranks2.run(chunk_group_ranks.unfrozen_between_micro_batches, stage)


@pytest.mark.parametrize(
    ("stage", "how"), [(3, "directory"), (3, "chunk"), (2, "chunk"), (1, "chunk")]
)
def test_what_one_rank_cannot_take_in_none_does(
    ranks2: RankPool, stage: int, how: str, tmp_path: Path
) -> None:
    found = ranks2.run(chunk_group_ranks.failing, stage, how, tmp_path)
    (message, waited_s, chunk_groups, masters), (own, _, own_chunk_groups, own_masters) = found
    assert re.match("StoreError" if how == "directory" else "OSError: no chunk", own)
    assert re.match(r"HeteroError: rank 1 could not .*(no chunk|StoreError)", message)
    assert chunk_groups == own_chunk_groups == 1
    assert waited_s < 45, "nobody waits for what does not come"
    assert all(map(torch.equal, masters, own_masters))


def test_buffers_of_a_new_module_are_those_of_the_first_rank(ranks2: RankPool) -> None:
    first, second = ranks2.run(chunk_group_ranks.new_module_with_a_buffer)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("later", [False, pytest.param(True, marks=pytest.mark.extra)])
def test_spare_memory_is_given_once(ranks2: RankPool, later: bool) -> None:
    for outcome in ranks2.run(chunk_group_ranks.room_for_all, later):
        assert re.match(r"room, room \d" if later else r"no room \d", outcome)


# Memory


def test_memory_is_reserved_as_the_refusal_says(tmp_path: Path) -> None:
    """What is placed first takes all that there is, but for what is reserved."""
    options = {
        "placement_policy": "nvme", "nvme_path": str(tmp_path), "chunk_numel": 4096,
        "host_memory": "300KiB",
    }  # fmt: skip
    model, optimizer = managed(build("unfreeze"), **options)
    engine = optimizer.engine
    masters, in_use = hetero.masters(model.parameters()), engine.ledger.in_use_bytes
    model.first.requires_grad_(True)
    with pytest.raises(hetero.BudgetError, match="other parameters .*reserve_memory=") as refused:
        model(inputs(0, 0))
    assert len(engine.chunk_groups) == 1
    assert engine.ledger.in_use_bytes == in_use
    assert all(map(torch.equal, masters, hetero.masters(model.parameters())))
    model.first.requires_grad_(False)
    loss_of(model, inputs(0, 0)).backward()
    optimizer.step()
    engine.close()
    (reserve,) = re.findall(r"reserve_memory=(\d+)", str(refused.value))
    options["reserve_memory"] = int(reserve)
    model, optimizer = managed(build("unfreeze"), **options)
    model.first.requires_grad_(True)
    loss_of(model, inputs(0, 0)).backward()
    optimizer.step()
    assert len(optimizer.engine.chunk_groups) == 2
    assert optimizer.engine.ledger.peak_bytes["host"] <= 300 << 10
    optimizer.engine.close()
    with pytest.raises(hetero.BudgetError, match="reserve_memory is 299"):
        managed(build("unfreeze"), **options | {"reserve_memory": "299KiB"})


# Failures


@pytest.mark.parametrize("policy", ["cpu", "nvme"])
def test_a_failure_half_way_changes_nothing(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "chunk_numel": 4096, "placement_policy": policy}
    if policy == "nvme":
        options |= {"nvme_path": str(tmp_path), "host_memory": "416KiB", "reserve_memory": "256KiB"}
    model, optimizer = managed(build("unfreeze"), **options)
    engine = optimizer.engine
    masters, in_use = hetero.masters(model.parameters()), engine.ledger.in_use_bytes
    model.first.requires_grad_(True)
    real = hetero.setup.first_values._fill_chunk

    def fill_chunk(chunk_group: Any, chunk: Any, *rest: Any) -> None:
        if chunk.id == 1:
            raise OSError("no chunk")
        real(chunk_group, chunk, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(hetero.setup.first_values, "_fill_chunk", fill_chunk)
        for _ in range(2):
            with pytest.raises(OSError, match="no chunk"):
                model(inputs(0, 0))
    assert engine.ledger.in_use_bytes == in_use
    assert all(map(torch.equal, masters, hetero.masters(model.parameters())))
    loss_of(model, inputs(0, 0)).backward()
    assert len(engine.chunk_groups) == 2
    optimizer.step()
    assert not torch.equal(hetero.masters(model.first.weight)[0], masters[0])
    engine.close()


# What is taken in


def test_a_parameter_of_another_stage_or_engine_is_refused(tmp_path: Path) -> None:
    model, optimizer = managed(Mixed(), dtype="fp32")
    with hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=str(tmp_path), host_memory=150_000
    ):
        model.extra = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    with pytest.raises(hetero.HeteroError, match=r"extra\.0\.weight .*ZeroInitContext"):
        optimizer.add_param_group({"params": model.extra.parameters()})
    other, others = managed(
        nn.Sequential(nn.Linear(128, 128)), dtype="fp32", placement_policy="nvme",
        nvme_path=str(tmp_path), host_memory="200KiB", chunk_numel=4096,
    )  # fmt: skip
    model.extra = other
    with pytest.raises(hetero.HeteroError, match=r"extra\.0\.weight .*another engine"):
        optimizer.add_param_group({"params": other.parameters()})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(hetero.HeteroError, match=r"0\.weight .*another engine"):
        managed(nn.Sequential(other[0]))
    for each in (optimizer, others):
        each.engine.close()


class Tied(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.middle = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(x))))


@pytest.mark.parametrize("policy", ["cpu", "nvme"])
@pytest.mark.parametrize("keep", [(), ("head.weight",)])
def test_unfreezing_a_tied_weight_between_micro_batches(
    policy: str, keep: tuple[str, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = Tied()
    state = plain.state_dict()
    model = Tied()
    model.load_state_dict(state)
    for each in (plain, model):
        each.embedding.requires_grad_(False)
    options: dict[str, Any] = {"dtype": "fp32", "chunk_numel": 4096, "placement_policy": policy}
    if policy == "nvme":
        options |= {"nvme_path": str(tmp_path), "host_memory": "384KiB", "reserve_memory": "256KiB"}
    model, optimizer = managed(model, **options, keep_fp32=list(keep))
    assert optimizer.engine.params.gathers == (policy == "nvme")
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    x = torch.arange(16).view(2, 8)
    for step in range(3):
        for micro in range(2):
            if (step, micro) == (1, 1):
                for each in (plain, model):
                    each.embedding.requires_grad_(True)
            for each in (plain, model):
                each(x + step + micro).logsumexp(-1).mean().backward()
        for each in (expected, optimizer):
            each.step()
            each.zero_grad()
    found = hetero.masters(model.parameters())
    for master, param in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(master, param.detach(), rtol=1e-5, atol=1e-5)
    optimizer.engine.close()


def small_on_disk(path: Path) -> dict[str, Any]:
    return {
        "placement_policy": "nvme", "nvme_path": str(path), "chunk_numel": 4096, "dtype": "fp32",
        "host_memory": "416KiB", "reserve_memory": "256KiB",
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["cpu", "nvme"])
def test_a_graph_that_is_older_than_the_move(policy: str, tmp_path: Path) -> None:
    """It reads the old chunk, which has the same bytes."""
    options = small_on_disk(tmp_path) if policy == "nvme" else {"dtype": "fp32"}
    model, optimizer = managed(build("unfreeze"), **options)
    x = inputs(0, 0).requires_grad_()
    old = loss_of(model, x)
    (wanted,) = torch.autograd.grad(old, x, retain_graph=True)
    model.first.requires_grad_(True)
    new = loss_of(model, x)
    assert len(optimizer.engine.chunk_groups) == 2
    (found,) = torch.autograd.grad(old, x)
    assert torch.equal(found, wanted)
    (found,) = torch.autograd.grad(new, x)
    assert torch.equal(found, wanted)
    optimizer.engine.close()


def test_batch_normalisation_that_is_unfrozen() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    model[1].requires_grad_(False)
    model, optimizer = managed(model, dtype="bf16")
    model(inputs(0, 0)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.requires_grad_(True)
    model(inputs(0, 1)).float().square().sum().backward()
    before = hetero.masters(model[1].weight)[0]
    optimizer.step()
    assert model[1].weight.dtype is torch.float32
    assert (
        optimizer.engine.params.group(optimizer.engine.find(model[1].weight).chunk).dtypes.compute
        == "fp32"
    )
    assert not torch.equal(before, hetero.masters(model[1].weight)[0])
    optimizer.engine.close()


def test_groups_that_have_parameters_already() -> None:
    model, optimizer = managed(build("unfreeze"))
    engine = optimizer.engine
    for params in (model.last.parameters(), model.first.parameters()):
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": params})
    model.extra = nn.Linear(64, 64)
    optimizer.add_param_group({"params": model.extra.parameters()})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model.extra.parameters()})
    assert (len(engine.chunk_groups), len(optimizer.param_groups)) == (2, 2)
    engine.close()


def test_a_partial_gradient_under_a_loss_scale_is_refused_and_may_be_dropped() -> None:
    model, optimizer = managed(build("unfreeze"), dtype="fp16")
    engine = optimizer.engine
    model.first.requires_grad_(True)
    model.first(torch.ones(1, 64, dtype=torch.float16)).float().sum().backward()
    with pytest.raises(hetero.HeteroError, match=r"first\.weight got a gradient before"):
        optimizer.step()
    assert len(engine.chunk_groups) == 1
    model.first.weight.grad = model.first.bias.grad = None
    optimizer.backward(loss_of(model, inputs(0, 0)))
    before = hetero.masters(model.first.weight)[0]
    optimizer.step()
    assert engine.shared.loss_scale.skipped_steps == 0
    assert not torch.equal(before, hetero.masters(model.first.weight)[0])
    engine.close()


def test_resuming_after_unfreezing(tmp_path: Path) -> None:
    """In a model that is not frozen at all, with states that are rounded by element numbers."""
    runs = []
    saved: dict[str, Any] = {}
    saved_model: dict[str, torch.Tensor] = {}
    for resumed in (False, True):
        model, optimizer = managed(build("unfreeze"), dtype="bf16")
        if resumed:
            optimizer.engine.close()
            model = Mixed()
            model, optimizer = managed(model, **small_on_disk(tmp_path) | {"dtype": "bf16"})
            model.load_state_dict(saved_model)
            optimizer.load_state_dict(saved)
        else:
            loss_of(model, inputs(0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.first.requires_grad_(True)
            loss_of(model, inputs(0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            saved_model = {k: v.clone() for k, v in model.state_dict().items()}
            saved = optimizer.state_dict()
        loss = loss_of(model, inputs(0, 2))
        loss.backward()
        optimizer.step()
        runs.append([loss.detach(), *hetero.masters(model.parameters())])
        optimizer.engine.close()
    assert all(map(torch.equal, *runs))
