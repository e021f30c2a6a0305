"""Parameters that come later: what may go wrong on the way."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
import hetero.setup.first_values
from hetero.chunks.layout import Chunk
from tests.support.ranks.processes import RankPool
from tests.support.ranks.rank_training import Experts
from tests.support.training.chunk_group_training import Mixed, build, inputs, loss_of


def managed_on_ranks(
    model: nn.Module, options: dict[str, Any], dtype: str = "fp32"
) -> tuple[nn.Module, hetero.HybridAdam]:
    """The model and its optimizer over the ranks."""
    params = [p for p in model.parameters() if p.requires_grad]
    settings = {"dtype": dtype, "placement_policy": "cpu", "rank_timeout_s": 60.0} | options
    optimizer = hetero.HybridAdam(params, lr=1e-2)
    return hetero.initialize(model, optimizer, **settings)


def twins(rank: int, world: int, frozen: bool, fewer: bool) -> str:
    """The error if ranks add two modules of the same shape in different order, or one only one."""
    model = Mixed()
    model.extra = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    if not frozen:
        later, model.extra = model.extra, nn.Identity()
    else:
        model.extra.requires_grad_(False)
    model, optimizer = managed_on_ranks(model, {})
    if not frozen:
        model.extra = later
    model.extra.requires_grad_(True)
    order = ["a", "b"] if rank == 0 or fewer else ["b", "a"]
    order = order[: 2 - rank] if fewer else order
    try:
        optimizer.add_param_group({"params": [model.extra[key].weight for key in order]})
    except hetero.HeteroError as error:
        return f"{len(optimizer.engine.chunk_groups)} chunk groups: {error}"
    finally:
        optimizer.engine.close()
    return "no error"


def inside_no_sync(rank: int, world: int, stage: int) -> list[torch.Tensor]:
    """Most is unfrozen inside no_sync(): nothing is sent there, and later at backward's end."""
    model = build("unfreeze-most")
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
    model, optimizer = hetero.initialize(
        model, optimizer, dtype="fp32", zero_stage=stage, placement_policy="cpu",
        chunk_numel=8192, rank_timeout_s=60.0,
    )  # fmt: skip
    engine = optimizer.engine
    with hetero.no_sync(model):
        model.requires_grad_(True)
        loss = loss_of(model, inputs(rank, 0))
        assert len(engine.chunk_groups) == 2
        assert [
            chunk_group.ranks.grad_reducer.reduces_in_backward
            for chunk_group in engine.chunk_groups
        ] == [
            False,
            False,
        ]
        loss.backward()
    assert [
        chunk_group.ranks.grad_reducer.reduces_in_backward for chunk_group in engine.chunk_groups
    ] == [
        True,
        False,
    ]
    loss_of(model, inputs(rank, 1)).backward()
    optimizer.step()
    found = hetero.masters(model.parameters())
    engine.close()
    return found


def mostly_unfrozen(rank: int, stage: int) -> tuple[Experts, hetero.HybridAdam]:
    """Eight experts that come later."""
    torch.manual_seed(0)
    model = Experts(8)
    model.experts.requires_grad_(False)
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
    model, optimizer = hetero.initialize(
        model, optimizer, dtype="fp32", zero_stage=stage, placement_policy="cpu",
        chunk_numel=8192, rank_timeout_s=60.0,
    )  # fmt: skip
    return model, optimizer


def other_modules_of_what_came_later(rank: int, world: int, stage: int) -> None:
    """One rank is done while the other needs its part to go on with its backward."""
    model, optimizer = mostly_unfrozen(rank, stage)
    model.experts.requires_grad_(True)
    for step in range(2):
        x = model(inputs(rank, step), None)
        for expert in [0] if rank == 0 else range(8):
            x = torch.tanh(model.experts[expert](x))
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.engine.close()


def without_data_after_unfreezing(rank: int, world: int, first: str) -> list[torch.Tensor]:
    """Rank 1 has no batch in the first backward of what was unfrozen."""
    model, optimizer = mostly_unfrozen(rank, 3)
    model.experts.requires_grad_(True)
    if rank == 0:
        model(inputs(rank, 0), 0).square().mean().backward()
    if first == "grads":
        found = [g for g in hetero.grads(model.parameters()) if g is not None]
    elif first == "norm":
        found = [hetero.clip_grad_norm_(model.parameters(), 1.0)]
    else:
        hetero.clip_grad_value_(model.parameters(), 1e-3)
        found = []
    optimizer.step()
    found += hetero.masters(model.parameters())
    optimizer.engine.close()
    return found


def unfrozen_between_micro_batches(rank: int, world: int, stage: int) -> None:
    """Parameters come while means are under way; ranks use modules in other order."""
    model, optimizer = mostly_unfrozen(rank, stage)
    for _ in range(2):  # the second backward averages in the order of the first
        model(inputs(rank, 0), None).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(inputs(rank, 1), None).square().mean().backward()
    model.experts.requires_grad_(True)
    x = inputs(rank, 2)
    with torch.enable_grad():
        x = model(x, None) if rank else model(x, None).detach()
        for expert in range(8):
            x = torch.tanh(model.experts[expert](x))
        if rank == 0:
            x = model.inner(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.engine.close()


def failing(
    rank: int, world: int, stage: int, how: str, path: Path
) -> tuple[str, float, int, list[torch.Tensor]]:
    """One rank cannot take in what is unfrozen: error, seconds, chunk groups, and masters after
    all.

    `how`: "directory" is gone, or the values cannot be moved to the second "chunk".
    """
    mine = path / str(rank)
    mine.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "zero_stage": stage,
        "chunk_numel": 4096,
        "nvme_path": str(mine),
    }
    model, optimizer = managed_on_ranks(
        build("unfreeze-most"),
        options | {"placement_policy": "nvme", "rank_timeout_s": 60.0, "host_memory": "1MiB"},
    )
    optimizer.add_param_group({"params": [p for p in model.parameters() if not p.requires_grad]})
    engine = optimizer.engine
    in_use = engine.ledger.in_use_bytes
    model.requires_grad_(True)
    x = inputs(rank, 0)
    before = hetero.setup.first_values._fill_chunk
    if rank == 1 and how == "directory":
        mine.rename(path / "away")
    elif rank == 1:

        def fill_chunk(chunk_group: Any, chunk: Chunk, *rest: Any) -> None:
            if chunk.id == 1:
                raise OSError("no chunk")
            before(chunk_group, chunk, *rest)

        hetero.setup.first_values._fill_chunk = fill_chunk
    message, started = "no error", time.monotonic()
    try:
        model(x)
    except (hetero.HeteroError, OSError) as error:
        message = f"{type(error).__name__}: {error}"
    waited_s = time.monotonic() - started
    chunk_groups = len(engine.chunk_groups)
    assert engine.ledger.in_use_bytes == in_use
    hetero.setup.first_values._fill_chunk = before
    if how == "directory" and rank == 1:
        (path / "away").rename(mine)
    for step in range(2):
        loss_of(model, inputs(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = hetero.masters(model.parameters())
    assert len(engine.chunk_groups) == 2
    engine.close()
    return message, waited_s, chunk_groups, found


class Noise(nn.Module):
    """With a buffer that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.register_buffer("noise", torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.to(x.dtype) + self.noise.to(x.dtype)


def new_module_with_a_buffer(rank: int, world: int) -> list[torch.Tensor]:
    """Its values on this rank, which drew its own."""
    model, optimizer = managed_on_ranks(build("add-new"), {})
    torch.manual_seed(rank)
    model.extra = Noise()
    optimizer.add_param_group({"params": model.extra.parameters()})
    found = [hetero.masters(model.extra.weight)[0], model.extra.noise.clone()]
    optimizer.engine.close()
    return found


def room_for_all(rank: int, world: int, later: bool) -> str:
    """Two chunk groups of which each would take all of the RAM that is left.

    Whether there is room for all parameters at once is not said; but once there was or was not,
    training has the room that was planned for it.
    """
    model = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(16)])
    keep = {} if later else {"keep_fp32": [f"{i}.*" for i in range(8, 16)]}
    if later:
        model[8:].requires_grad_(False)
    given = list(model.parameters())
    options: dict[str, Any] = {"chunk_numel": 16384, "placement_policy": "cpu", **keep}
    options |= {"rank_timeout_s": 60.0, "dtype": "bf16"}
    # 16 chunks of 8192 elements a rank; what is left would do for half of all gathered copies.
    options["host_memory"] = 16 * 8192 * (2 + 2 + 10) + 10 * 32768 + 12 * 32768 + (3 << 18)
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(given, lr=1e-2), **options)
    engine = optimizer.engine
    outcome = "room"

    def take_all(params: Any) -> str:
        try:
            with hetero.gathered(params):
                return "room"
        except hetero.BudgetError:
            return "no room"

    outcome = take_all(model.parameters())
    if later:
        model.requires_grad_(True)
        engine.steps.added_params.take_in_unfrozen()
        outcome += ", " + take_all(model.parameters())
    used = engine.ledger.in_use_bytes["host"]
    x = torch.ones(1, 128, dtype=torch.bfloat16)
    for layer in model:
        x = layer(x.to(layer.weight.dtype))
    x.sum().backward()
    optimizer.step()
    engine.close()
    assert used <= engine.ledger.budget_bytes["host"]
    return f"{outcome} {used}"


def managed(model: nn.Module, **options: Any) -> tuple[nn.Module, hetero.HybridAdam]:
    return hetero.initialize(
        model, hetero.HybridAdam(model.parameters(), lr=1e-2),
        **{"placement_policy": "cpu"} | options,
    )  # fmt: skip


# Ranks


@pytest.mark.parametrize(("frozen", "fewer"), [(False, False), (True, False), (True, True)])
def test_ranks_that_add_other_parameters(ranks2: RankPool, frozen: bool, fewer: bool) -> None:
    """The same ones in another order, or fewer."""
    for error in ranks2.run(twins, frozen, fewer):
        assert re.search(r"1 chunk groups: .*differ between ranks: number \d .*extra\.[ab]", error)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.extra)])
def test_unfreezing_inside_no_sync(ranks2: RankPool, stage: int) -> None:
    first, second = ranks2.run(inside_no_sync, stage)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.extra), 3])
def test_a_rank_that_is_done_sends_what_others_need_for_their_backward(
    ranks2: RankPool, stage: int
) -> None:
    ranks2.run(other_modules_of_what_came_later, stage)


@pytest.mark.parametrize(
    "first",
    ["grads", *(pytest.param(each, marks=pytest.mark.extra) for each in ("norm", "value"))],
)
def test_a_rank_without_data_takes_in_what_was_unfrozen(ranks2: RankPool, first: str) -> None:
    found, other = ranks2.run(without_data_after_unfreezing, first)
    assert all(map(torch.equal, found, other))
    assert len(found) == len(other)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.extra)])
def test_unfreezing_between_micro_batches_of_ranks(ranks2: RankPool, stage: int) -> None:
    ranks2.run(unfrozen_between_micro_batches, stage)


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (3, "directory"),
        (1, "chunk"),
        *(pytest.param(stage, "chunk", marks=pytest.mark.extra) for stage in (2, 3)),
    ],
)
def test_what_one_rank_cannot_take_in_none_does(
    ranks2: RankPool, stage: int, how: str, tmp_path: Path
) -> None:
    found = ranks2.run(failing, stage, how, tmp_path)
    (message, waited_s, chunk_groups, masters), (own, _, own_chunk_groups, own_masters) = found
    assert re.match("StoreError" if how == "directory" else "OSError: no chunk", own)
    assert re.match(r"HeteroError: rank 1 could not .*(no chunk|StoreError)", message)
    assert chunk_groups == own_chunk_groups == 1
    assert waited_s < 45, "nobody waits for what does not come"
    assert all(map(torch.equal, masters, own_masters))


def test_buffers_of_a_new_module_are_those_of_the_first_rank(ranks2: RankPool) -> None:
    first, second = ranks2.run(new_module_with_a_buffer)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("later", [False, pytest.param(True, marks=pytest.mark.extra)])
def test_spare_memory_is_given_once(ranks2: RankPool, later: bool) -> None:
    for outcome in ranks2.run(room_for_all, later):
        assert re.match(r"room, room \d" if later else r"no room \d", outcome)


# Memory


@pytest.mark.parametrize("grouped", [True, False])
def test_a_frozen_parameter_that_was_written_is_unfrozen(grouped: bool) -> None:
    """In RAM a write in place is noticed when something asks: it is no use of the parameter."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    given = model.parameters() if grouped else model[1].parameters()
    model, optimizer = hetero.initialize(
        model, hetero.HybridSGD(given, lr=0.5), dtype="fp32", placement_policy="cpu"
    )
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    model[0].weight.requires_grad_(True)
    if not grouped:
        optimizer.add_param_group({"params": [model[0].weight]})
    model(torch.ones(1, 8)).sum().backward()
    grad = model[0].weight.grad.clone()
    optimizer.step()
    assert grad.any()
    torch.testing.assert_close(model[0].weight.detach(), 2.0 - 0.5 * grad)
    optimizer.engine.close()


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


@pytest.mark.covering(1)
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
