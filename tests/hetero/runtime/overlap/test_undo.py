"""optimizer.undo_last_step(): after it all is as if the step had never been made, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hetero
from offload.errors import HeteroError, StaleGraphError
from tests.support.ranks import overlapping
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import same
from tests.support.training.overlap_net import (
    OVERLAPS,
    PLACES,
    UNDO_PLACES,
    WIDTH,
    Block,
    Net,
    backward,
    build,
    everything,
    loss_of,
    one_step,
    result,
    undoable,
)

RULES: dict[str, Callable[..., hetero.HybridOptimizer]] = {
    "adam": hetero.HybridAdam,
    "lion": hetero.HybridLion,
    "adagrad": hetero.HybridAdagrad,
    "sgd": lambda params, **options: hetero.HybridSGD(params, momentum=0.9, **options),
}


# What comes back


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("place", UNDO_PLACES)
def test_training_goes_on_as_without_the_step(tmp_path: Path, place: str, overlap: str) -> None:
    """Undone are a first step, one whose factor was guessed right and one where it was wrong."""
    results = []
    for undoes in (False, True):
        model, optimizer = undoable(tmp_path, place, overlap)
        for step in range(6):
            backward(model, optimizer, step, 1e-3 if step == 4 else 1e6)
            optimizer.step()
            optimizer.zero_grad()
            if undoes and step == 0:
                optimizer.undo_last_step()
                one_step(model, optimizer, 0)
            elif undoes and step in (2, 3):
                backward(model, optimizer, 100 + step, 1e-3 if step == 3 else 1e6)
                optimizer.step()
                if step == 2:
                    with torch.no_grad():
                        loss_of(model, 7)
                optimizer.zero_grad()
                optimizer.undo_last_step()
        results.append(result(model, optimizer))
    assert same(*results)


@pytest.mark.covering(2)
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("place", ["ram", "disk"])
def test_all_state_of_every_rule(tmp_path: Path, place: str, rule: str, state_dtype: str) -> None:
    """The same gradients give the same step once more."""
    torch.manual_seed(0)
    model: nn.Module = Net()
    optimizer = RULES[rule](model.parameters(), lr=1e-2, state_dtype=state_dtype)
    options = {"chunk_numel": 8192, "undoable_steps": True, "nvme_path": str(tmp_path)}
    model, optimizer = hetero.initialize(model, optimizer, **PLACES[place], **options)
    for step in range(2):
        one_step(model, optimizer, step)  # type: ignore[arg-type]
    before = everything(model, optimizer)
    backward(model, optimizer, 2)
    optimizer.step()
    after = everything(model, optimizer)
    assert not same(before, after)
    optimizer.undo_last_step()
    assert same(before, everything(model, optimizer))
    optimizer.step()
    assert same(after, everything(model, optimizer))
    optimizer.undo_last_step()
    assert same(before, everything(model, optimizer))
    optimizer.engine.close()


class Half(nn.Module):
    """A module of several parameters, in a chunk of several slots, some of which are not used."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second", "third"):
            setattr(self, name, nn.Parameter(torch.randn(2 * WIDTH, WIDTH)))
        self.used = "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ getattr(self, self.used).T


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlap", ["none", "both"])
@pytest.mark.parametrize("place", ["ram", "optim_states", "disk"])
def test_parameters_of_a_chunk_that_get_no_gradient(
    tmp_path: Path, place: str, overlap: str
) -> None:
    """Their tiles have no update, and their state stays where it can be found."""
    results = []
    for undoes in (False, True):
        host = {} if place == "ram" else {"host_memory": "2MiB"}
        model, optimizer = undoable(tmp_path, place, overlap, Half, shard_strategy="bucket", **host)
        assert any(c.slots > 2 for c in optimizer.engine.layout.chunks)
        for step, used in enumerate(["first", "second", "second", "third", "first", "third"]):
            model.used = used
            one_step(model, optimizer, step)
            if undoes and step > 0:
                model.used = "first" if step % 2 else "third"
                backward(model, optimizer, 100 + step)
                optimizer.step()
                optimizer.undo_last_step()
                optimizer.zero_grad()
        results.append(result(model, optimizer))
    assert same(*results)


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_the_loss_scale_of_fp16(tmp_path: Path, place: str) -> None:
    """Steps that overflow, and one that doubles the scale."""
    options = {"dtype": "fp16", "initial_loss_scale": 2.0**20, "loss_scale_window": 2}
    model, optimizer = undoable(tmp_path, place, **options)
    skipped = set()
    for step in range(12):
        before = everything(model, optimizer)
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        after = everything(model, optimizer)
        optimizer.undo_last_step()
        assert same(before, everything(model, optimizer))
        optimizer.step()
        assert same(after, everything(model, optimizer))
        optimizer.zero_grad()
        skipped.add(optimizer.engine.loss_scale.skipped_steps)
    assert len(skipped) > 1
    assert max(skipped) < 12
    optimizer.engine.close()


def test_a_step_without_gradients(tmp_path: Path) -> None:
    """It changes nothing, nor does its being undone; the step before it is out of reach."""
    model, optimizer = undoable(tmp_path, "disk")
    one_step(model, optimizer, 0)
    after = everything(model, optimizer)
    optimizer.step()
    optimizer.undo_last_step()
    assert same(after, everything(model, optimizer))
    with pytest.raises(HeteroError, match="undone already"):
        optimizer.undo_last_step()
    optimizer.engine.close()


@pytest.mark.parametrize("place", ["ram", "optim_states", "disk"])
def test_param_groups_and_frozen_parameters(tmp_path: Path, place: str) -> None:
    """Some are frozen from the start, some later; groups have options of their own."""
    torch.manual_seed(0)
    model: Any = Net()
    model.blocks[1].requires_grad_(False)
    inner = list(model.inner.parameters())
    rest = [p for p in model.parameters() if p.requires_grad and p is not inner[0]]
    groups = [{"params": inner, "lr": 1e-3}, {"params": rest, "weight_decay": 0.5}]
    options = {"chunk_numel": 8192, "undoable_steps": True, "nvme_path": str(tmp_path)}
    optimizer: Any = hetero.HybridAdam(groups, lr=1e-2)
    model, optimizer = hetero.initialize(model, optimizer, **PLACES[place], **options)
    one_step(model, optimizer, 0)
    model.blocks[2].requires_grad_(False)
    before = everything(model, optimizer)
    for lr in (1e-1, 1e-4):
        backward(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        optimizer.undo_last_step()
        assert same(before, everything(model, optimizer))
        assert optimizer.param_groups[0]["lr"] == lr
    optimizer.engine.close()


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_of_several_optimizers_the_one_that_made_the_last_step_undoes_it(
    tmp_path: Path, place: str
) -> None:
    """Two of one rule, whose parameters share chunks."""
    torch.manual_seed(0)
    model: Any = Net()
    params = list(model.parameters())
    optimizers: Any = [hetero.HybridAdam(params[::2]), hetero.HybridAdam(params[1::2])]
    options = {"chunk_numel": 8192, "undoable_steps": True, "nvme_path": str(tmp_path)}
    model, (one, other) = hetero.initialize(model, optimizers, **PLACES[place], **options)

    def both() -> list[torch.Tensor]:
        return [*everything(model, one), *everything(model, other)]

    backward(model, one, 0)
    one.step()
    before = both()
    other.step()
    with pytest.raises(HeteroError, match="another optimizer"):
        one.undo_last_step()
    other.undo_last_step()
    assert same(before, both())
    with pytest.raises(HeteroError, match="undone already"):
        one.undo_last_step()
    one.engine.close()


@pytest.mark.parametrize("place", ["optim_states", "disk"])
def test_parameters_that_are_added(tmp_path: Path, place: str) -> None:
    """The last step before can be undone, and those after it."""
    more = {"host_memory": "4MiB", "reserve_memory": "1MiB"}
    model, optimizer = undoable(tmp_path, place, **more)
    params = list(model.parameters())
    one_step(model, optimizer, 0)
    before = hetero.masters(params)
    one_step(model, optimizer, 1)
    model.blocks.append(Block())
    optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})
    optimizer.undo_last_step()
    assert same(before, hetero.masters(params))
    for step in range(2, 4):
        before = everything(model, optimizer)
        backward(model, optimizer, step)
        optimizer.step()
        optimizer.undo_last_step()
        assert same(before, everything(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.engine.close()


def test_graphs_of_the_undone_values_are_stale(tmp_path: Path) -> None:
    for place, error in (("disk", StaleGraphError), ("ram", RuntimeError)):
        model, optimizer = undoable(tmp_path, place)
        one_step(model, optimizer, 0)
        loss = loss_of(model, 1)
        optimizer.undo_last_step()
        with pytest.raises(error):
            loss.backward()
        optimizer.zero_grad()
        # The number of the update is the undone one's again; the values are not.
        loss = loss_of(model, 1)
        backward(model, optimizer, 2)
        optimizer.step()
        with pytest.raises(error):
            loss.backward()
        optimizer.engine.close()


# When it is refused


def _gradient(model: Any, optimizer: Any) -> None:
    with hetero.no_sync(model):
        loss_of(model, 1).backward()
    optimizer.zero_grad()


def _write(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model.inner.weight[0, 0] = 3.0


def _change(model: Any, optimizer: Any) -> None:
    with hetero.gathered(model.inner.weight, modifier_rank=0):
        model.inner.weight.data.mul_(0.5)


def _load(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _load_model(model: Any, optimizer: Any) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def _move(model: Any, optimizer: Any) -> None:
    optimizer.engine.set_budget(host_memory="3MiB")


def _undo(model: Any, optimizer: Any) -> None:
    optimizer.undo_last_step()


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("action", "why"),
    [
        (_gradient, "a gradient of the next step has come"),
        (_write, "loaded or written to"),
        (_change, "loaded or written to"),
        (_load, "loaded or written to"),
        (_load_model, "loaded or written to"),
        (_move, "homes have moved"),
        (_undo, "undone already"),
    ],
)
@pytest.mark.parametrize("place", ["optim_states", "disk"])
def test_what_ends_the_chance(
    tmp_path: Path, place: str, action: Callable[[Any, Any], None], why: str
) -> None:
    """Nothing is changed by the refusal, and the next step can be undone again."""
    model, optimizer = undoable(tmp_path, place)
    with pytest.raises(HeteroError, match=r"none was made since hetero\.initialize"):
        optimizer.undo_last_step()
    for step in range(2):
        one_step(model, optimizer, step)
    action(model, optimizer)
    before = everything(model, optimizer)
    with pytest.raises(HeteroError, match=why):
        optimizer.undo_last_step()
    assert same(before, everything(model, optimizer))
    one_step(model, optimizer, 2)
    optimizer.undo_last_step()
    assert same(before, everything(model, optimizer))
    optimizer.engine.close()


def test_what_is_in_use_is_not_changed(tmp_path: Path) -> None:
    for place in ("ram", "disk"):
        model, optimizer = undoable(tmp_path, place)
        before = everything(model, optimizer)
        one_step(model, optimizer, 0)
        with (
            hetero.gathered(model.inner.weight),
            pytest.raises(HeteroError, match="is in use"),
        ):
            optimizer.undo_last_step()
        optimizer.undo_last_step()
        assert same(before, everything(model, optimizer))
        optimizer.engine.close()


def test_without_the_option(tmp_path: Path) -> None:
    """It is refused, although speculative updates happen to leave old state."""
    model, optimizer = build(Net, tmp_path, "disk", "both")
    for step in range(3):
        one_step(model, optimizer, step)
    with pytest.raises(HeteroError, match="undoable_steps=True"):
        optimizer.undo_last_step()
    optimizer.engine.close()


def test_an_optimizer_whose_updates_have_two_passes(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    options: Any = {"undoable_steps": True, "nvme_path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"HybridMuon's have 2"):
        hetero.initialize(model, hetero.HybridMuon(model.parameters()), **options)


# Several ranks


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlap", ["none", "auto", "both"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_undo_steps_together(
    ranks2: RankPool, stage: int, overlap: str, tmp_path: Path
) -> None:
    options = {
        "zero_stage": stage,
        "overlap_updates": overlap,
        "placement_policy": "nvme",
        "nvme_path": str(tmp_path),
        "host_memory": {1: "2MiB", 2: "1400KiB", 3: "1MiB"}[stage],
    }
    found, wanted = (
        ranks2.run(overlapping.undone_steps, options, undone) for undone in ([0, 2, 3, 4], [])
    )
    for one, other in zip(found, wanted, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("policy", ["cpu", "auto"])
def test_ranks_with_all_state_in_ram(ranks2: RankPool, policy: str, tmp_path: Path) -> None:
    options = {"placement_policy": policy, "nvme_path": str(tmp_path), "zero_stage": 2}
    found, wanted = (
        ranks2.run(overlapping.undone_steps, options, undone) for undone in ([1, 2], [])
    )
    for one, other in zip(found, wanted, strict=True):
        assert same(one, other)


def test_replicas_of_shards(ranks4: RankPool, tmp_path: Path) -> None:
    """Hybrid sharding: two replicas, each of two ranks."""
    options = {"placement_policy": "nvme", "nvme_path": str(tmp_path), "zero_stage": 2}
    found, wanted = (
        ranks4.run(overlapping.undone_steps, options, undone, True) for undone in ([1, 2], [])
    )
    for one, other in zip(found, wanted, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_if_one_rank_cannot_none_does(ranks2: RankPool, stage: int, tmp_path: Path) -> None:
    options = {"zero_stage": stage, "placement_policy": "nvme", "nvme_path": str(tmp_path)}
    for told, masters in ranks2.run(overlapping.undo_that_one_rank_cannot, options):
        assert "is in use" in told
        fresh = overlapping.first_masters()
        assert same(masters, fresh)


# In any place and any loop

# Where state is, by place and budget of RAM.
WHERE = [
    *(("ram", None), ("optim_states", "1MiB"), ("optim_states", "1500KiB")),
    *(("optim_states", "6MiB"), ("disk", "600KiB"), ("emulated", "900KiB")),
]


@dataclass(frozen=True)
class Step:
    """A step, and how often one like it is made and undone before."""

    undone: int
    again: bool  # the last undone one is made again with the gradients that it has left
    clip: float
    left_out: int | None  # the block whose parameters get no gradient
    between: str  # what is done between a step and its being undone
    budget: str | None  # to which RAM is set afterwards


UNDONE_STEPS = st.builds(
    Step,
    undone=st.sampled_from([0, 0, 1, 2]),
    again=st.booleans(),
    clip=st.sampled_from([1e6, 1e6, 1e-3]),
    left_out=st.sampled_from([None, None, 0, 3]),
    between=st.sampled_from(["", "clear", "evaluate", "read", "save", "wait"]),
    budget=st.sampled_from([None, None, None, "1MiB", "3MiB"]),
)


def _do(model: nn.Module, optimizer: Any, what: str) -> None:
    if what == "clear":
        optimizer.zero_grad()
    elif what == "evaluate":
        with torch.no_grad():
            loss_of(model, 77)
    elif what == "read":
        assert all(p.isfinite().all() for p in model.parameters())
    elif what == "save":
        everything(model, optimizer)
    elif what == "wait":
        optimizer.engine.synchronize()


def _train(
    loop: list[Step], undoes: bool, place: str, rule: str, **options: Any
) -> list[torch.Tensor]:
    """What training makes, with or without the steps that are undone."""
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = RULES[rule](
        model.parameters(), lr=1e-2, weight_decay=0.1, state_dtype=options.pop("state_dtype")
    )
    with TemporaryDirectory() as folder:
        given = {"chunk_numel": 8192, "nvme_path": folder, "undoable_steps": True}
        model, optimizer = hetero.initialize(model, optimizer, **PLACES[place] | given | options)

        def step(seed: int, made: Step) -> None:
            backward(model, optimizer, seed, made.clip)
            if made.left_out is not None:
                for p in model.blocks[made.left_out].parameters():
                    p.grad = None
            optimizer.step()

        for number, made in enumerate(loop):
            for again in range(made.undone if undoes else 0):
                step(100 * (again + 1) + number, made)
                _do(model, optimizer, made.between)
                optimizer.undo_last_step()
                if made.again and made.between != "clear" and again + 1 == made.undone:
                    optimizer.step()
                    optimizer.undo_last_step()
                optimizer.zero_grad()
            step(number, made)
            optimizer.zero_grad()
            if made.budget is not None and place == "optim_states":
                optimizer.engine.set_budget(host_memory=made.budget)
        found = everything(model, optimizer)
        optimizer.engine.close()
    return found


@settings(max_examples=8)
@given(
    loop=st.lists(UNDONE_STEPS, min_size=2, max_size=5),
    where=st.sampled_from(WHERE),
    overlap=st.sampled_from(OVERLAPS),
    rule=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from(["bf16", "bf16", "fp32"]),
    state_dtype=st.sampled_from(["fp32", "bf16", "8bit"]),
    keep_fp32=st.sampled_from([(), ("*norm*",)]),
    strategy=st.sampled_from(["chunk", "bucket"]),
    prefetch=st.booleans(),
)
def test_the_rest_of_any_loop_has_the_bits_of_one_without_undone_steps(
    loop: list[Step],
    where: tuple[str, str | None],
    overlap: str,
    rule: str,
    dtype: str,
    state_dtype: str,
    keep_fp32: tuple[str, ...],
    strategy: str,
    prefetch: bool,
) -> None:
    place, host = where
    options: dict[str, Any] = {"dtype": dtype, "state_dtype": state_dtype, "prefetch": prefetch}
    options |= {"keep_fp32": keep_fp32, "shard_strategy": strategy, "overlap_updates": overlap}
    if host is not None:
        options["host_memory"] = host
    if dtype == "fp32" or keep_fp32:
        options["host_memory"] = "6MiB" if place != "ram" else None
        loop = [Step(**{**vars(made), "budget": None}) for made in loop]
    wanted, found = (_train(loop, undoes, place, rule, **options) for undoes in (False, True))
    assert same(wanted, found)
