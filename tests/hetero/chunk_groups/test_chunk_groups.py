"""Several chunk groups: parameters kept in fp32, unfrozen, added later, beside plain PyTorch."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.planning.placement import PlacementError
from tests.support.ranks.processes import RankPool
from tests.support.training.chunk_group_training import (
    KEPT,
    SCRIPTS,
    Mixed,
    assert_same,
    build,
    inputs,
    is_mixed,
    loss_of,
    train,
    train_plain,
    uneven,
)

PLACES = ["cpu", "nvme", "late-on-disk"]


def settings_of(place: str, script: str, dtype: str, path: Path) -> dict[str, Any]:
    """ "late-on-disk": what is there first just fits in RAM, and what comes later does not."""
    settings: dict[str, Any] = {"dtype": dtype, "chunk_numel": 4096}
    if dtype == "fp16":
        settings["initial_loss_scale"] = None
    if place == "cpu":
        return settings | {"placement_policy": "cpu"}
    settings |= {"placement_policy": "nvme", "nvme_path": str(path)}
    if place == "late-on-disk":
        more = {"keep_fp32": KEPT} if is_mixed(script) else {}
        with hetero.ZeroInitContext(host_memory="8MiB", **settings, **more):
            model = build(script)
        given = [p for p in model.parameters() if p.requires_grad or script != "add-frozen"]
        _, optimizer = hetero.initialize(model, hetero.HybridAdam(given))
        need = sum(
            chunk_group.placement.host_bytes for chunk_group in optimizer.engine.chunk_groups
        )
        optimizer.engine.close()
        settings["host_memory"] = need + (160 << 10)
    return settings


def cases(*axes: Sequence[Any]) -> list[Any]:
    """All combinations; every seventh is run always, the others by `make test-all`."""
    return [
        pytest.param(*values, marks=() if index % 7 == 0 else pytest.mark.extra)
        for index, values in enumerate(product(*axes))
    ]


@pytest.mark.parametrize(
    ("dtype", "place", "script"), cases(("fp32", "bf16", "fp16"), PLACES, SCRIPTS)
)
def test_same_bits_as_plain_torch(
    script: str, place: str, dtype: str, tmp_path: Path, nothing_left: None
) -> None:
    settings = settings_of(place, script, dtype, tmp_path)
    run = train(0, 1, script, settings)
    (expected,) = train_plain(script, dtype)
    assert_same(run, expected)
    mixed = is_mixed(script) and dtype != "fp32"
    changes = script != "mixed"
    assert run.chunk_groups == 1 + mixed + changes + (script == "unfreeze-mixed" and mixed)
    if place != "cpu":
        assert run.on_disk
        assert run.peak <= settings.get("host_memory", run.peak)
    if script in ("mixed", "add-frozen", "add-new"):
        for state, wanted in zip(run.states, expected.states, strict=True):
            for key, value in wanted.items():
                assert torch.equal(state[key], value), key


@pytest.mark.parametrize(("stage", "script"), cases((1, 2, 3), SCRIPTS))
def test_two_ranks_are_the_mean_of_two(
    ranks2: RankPool, script: str, stage: int, tmp_path: Path
) -> None:
    dtype = "fp32" if stage == 2 else "bf16"
    options = {"dtype": dtype, "zero_stage": stage, "chunk_numel": 8192}
    if stage == 3:
        options |= {"placement_policy": "nvme", "nvme_path": str(tmp_path)}
    else:
        options["placement_policy"] = "cpu"
    found = ranks2.run(train, script, options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have, or sums are taken in another order
    try:
        plain = train_plain(script, dtype, 2)
    finally:
        torch.set_num_threads(threads)
    for run, expected in zip(found, plain, strict=True):
        assert_same(run, expected)


def test_ranks_whose_gradients_are_in_different_banks(ranks2: RankPool) -> None:
    """A rank may have none in a chunk group in which another has some; stages agree bit for bit."""
    runs = [
        found
        for stage in (1, 2, 3)
        for found in ranks2.run(
            uneven,
            {"zero_stage": stage, "grad_dtype": "fp32", "chunk_numel": 8192},
        )
    ]
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


# keep_fp32


def managed(model: nn.Module, **options: Any) -> tuple[nn.Module, hetero.HybridAdam]:
    return hetero.initialize(
        model, hetero.HybridAdam(model.parameters()), **{"placement_policy": "cpu"} | options
    )


def test_a_pattern_that_fits_nothing() -> None:
    with pytest.raises(ValueError, match=r"keep_fp32: .*'nrom\.\*'; the nearest is 'norm\."):
        managed(Mixed(), keep_fp32=["nrom.*"])
    with pytest.raises(ValueError, match="keep_fp32 must be a list of patterns"):
        hetero.Config(keep_fp32="norm.*")


def test_dtypes_of_kept_parameters() -> None:
    model, optimizer = managed(Mixed(), keep_fp32=("norm.*",))
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    kept = {name for name, dtype in dtypes.items() if dtype is torch.float32}
    assert kept == {"norm.weight", "norm.bias"}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    fp32 = optimizer.engine.chunk_groups[1].dtypes
    assert (fp32.grad, fp32.master_bytes, fp32.optim_state_bytes(4096)) == ("fp32", 0, 8 * 4096)
    # Not much more than it has.
    assert optimizer.engine.chunk_groups[1].layout.slot_numel == 4096
    optimizer.engine.close()


def test_all_kept_is_a_model_in_fp32() -> None:
    model, optimizer = managed(Mixed(), keep_fp32=["*"])
    assert len(optimizer.engine.chunk_groups) == 1
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(torch.ones(1, 64)).dtype is torch.float32
    optimizer.engine.close()


def test_torch_clipping_and_masters_over_both_banks() -> None:
    """torch.nn.utils.clip_grad_norm_ by itself, and hetero's, give one norm and one factor."""
    both = []
    for clip in (torch.nn.utils.clip_grad_norm_, hetero.clip_grad_norm_):
        model = build("mixed")
        model, optimizer = managed(model, keep_fp32=KEPT)
        loss_of(model, inputs(0, 0)).backward()
        norm = clip(model.parameters(), 1e-3)
        optimizer.step()
        both.append((norm, hetero.masters(model.parameters())))
        optimizer.engine.close()
    assert both[0][0] == pytest.approx(both[1][0].item(), rel=1e-6)
    for found, wanted in zip(both[0][1], both[1][1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", ["norm.weight", "last.weight"])
def test_an_overflow_in_either_bank_skips_the_step_of_both(bad: str) -> None:
    model, optimizer = managed(build("mixed"), dtype="fp16", keep_fp32=KEPT)
    before = hetero.masters(model.parameters())
    optimizer.backward(loss_of(model, inputs(0, 0)))
    param = dict(model.named_parameters())[bad]
    param.grad = torch.full_like(param, float("inf"))
    optimizer.step()
    assert optimizer.engine.shared.loss_scale.skipped_steps == 1
    assert all(map(torch.equal, before, hetero.masters(model.parameters())))
    optimizer.engine.close()


@pytest.mark.parametrize("script", ["mixed", "unfreeze"])
def test_states_go_from_one_run_to_another(script: str) -> None:
    (saver, saving), (loader, loading) = (managed(build(script), keep_fp32=KEPT) for _ in range(2))
    if script == "unfreeze":
        for model in (saver, loader):
            model.first.requires_grad_(True)
    loss_of(saver, inputs(0, 0)).backward()
    saving.step()
    loader.load_state_dict(saver.state_dict())
    loading.load_state_dict(saving.state_dict())
    assert all(map(torch.equal, *(hetero.masters(m.parameters()) for m in (saver, loader))))
    for each in (saving, loading):
        each.engine.close()


def smallest(policy: dict[str, Any], host_memory: int) -> int:
    with pytest.raises(hetero.BudgetError, match="other parameters of this model take") as refusal:
        managed(build("mixed"), **policy, host_memory=host_memory)
    found = re.search(r"smallest that works is .*?\((\d+) bytes\)", str(refusal.value))
    assert found
    return int(found[1])


@pytest.mark.parametrize("policy", ["cpu", "nvme", "auto"])
def test_the_smallest_budget_is_that_of_all_banks(policy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"placement_policy": policy, "keep_fp32": KEPT}
    if policy != "cpu":
        options["nvme_path"] = str(tmp_path)
    least = smallest(options, 70_000)
    assert smallest(options, least - 1) == least
    model, optimizer = managed(build("mixed"), **options, host_memory=least)
    loss_of(model, inputs(0, 0)).backward()
    optimizer.step()
    assert optimizer.engine.ledger.peak_bytes["host"] <= least
    optimizer.engine.close()


@pytest.mark.parametrize("policy", ["cpu", "nvme"])
def test_the_smallest_device_is_that_of_all_banks(policy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"placement_policy": policy, "keep_fp32": KEPT}
    options |= {"backend": "emulated", "chunk_numel": 4096}
    if policy == "nvme":
        options["nvme_path"] = str(tmp_path)

    def smallest_device(device_memory: int) -> int:
        with pytest.raises(PlacementError, match="device_memory is") as refusal:
            managed(build("mixed"), **options, device_memory=device_memory)
        return refusal.value.smallest_device_bytes

    least = smallest_device(1)
    assert smallest_device(least - 1) == least
    model, optimizer = managed(build("mixed"), **options, device_memory=least)
    loss_of(model, inputs(0, 0)).backward()
    optimizer.step()
    assert optimizer.engine.ledger.peak_bytes["device"] <= least
    optimizer.engine.close()


# What comes later


def test_unfreezing_is_noticed_at_a_step_too() -> None:
    """Where only a part of the model ran forward: its plain gradient is taken in."""
    model, optimizer = managed(build("unfreeze"), dtype="fp32")
    model.first.requires_grad_(True)
    model.first(torch.ones(1, 64)).sum().backward()
    before = model.first.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, hetero.masters(model.first.weight)[0])
    assert len(optimizer.engine.chunk_groups) == 2
    optimizer.engine.close()


def test_evaluation_and_gathered_leave_frozen_parameters_where_they_are(tmp_path: Path) -> None:
    model, optimizer = managed(
        build("unfreeze"), placement_policy="nvme", nvme_path=str(tmp_path), host_memory="300KiB",
        chunk_numel=4096,
    )  # fmt: skip
    engine = optimizer.engine
    model.first.requires_grad_(True)
    with torch.no_grad():
        model(inputs(0, 0))
    with hetero.gathered(model.first.weight, modifier_rank=0):
        model(inputs(0, 0))
    assert engine.find(model.first.weight).chunk.group_index == 0
    engine.close()


def test_a_refused_context_frees_its_file_at_once(tmp_path: Path) -> None:
    with hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=str(tmp_path), host_memory=200_000
    ) as context:
        model = nn.ModuleList([nn.Linear(128, 128) for _ in range(8)])
    construction = weakref.ref(context.construction)
    gc.disable()
    try:
        del context, model
        assert construction() is None
    finally:
        gc.enable()
