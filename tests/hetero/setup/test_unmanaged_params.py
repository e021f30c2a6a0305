"""Parameters of dtypes that get no place in a chunk: refused, or counted where they stay."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from offload.device.cuda_backend import CudaBackend
from offload.memory.tiers import Account, Tier
from tests.support.native.fake_cuda import FakeRuntime

NUMEL = 5000
SMALL_FLOATS = [
    dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype)
    and dtype.is_floating_point
    and dtype.itemsize < 2
]
OTHERS = [torch.uint8, torch.int64, torch.bool, torch.complex64]


class Quantized(nn.Module):
    """A layer with codes beside it, as modules of libraries for quantized weights have them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        codes = torch.arange(NUMEL * dtype.itemsize, dtype=torch.int64) % 2
        self.codes = nn.Parameter(codes.to(torch.uint8).view(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def initialized(model: nn.Module, **options: Any) -> hetero.HybridAdam:
    trained = [p for p in model.parameters() if p.requires_grad]
    _, optimizer = hetero.initialize(model, hetero.HybridAdam(trained), **options)
    return optimizer


def built_in_context(dtype: torch.dtype, **options: Any) -> Any:
    with hetero.ZeroInitContext(**options):
        model = Quantized(dtype)
    return initialized(model), model


def built_outside(dtype: torch.dtype, **options: Any) -> Any:
    model = Quantized(dtype)
    return initialized(model, **options), model


def copied_in_context(dtype: torch.dtype, **options: Any) -> Any:
    plain = Quantized(dtype)
    with hetero.ZeroInitContext(**options):
        model = copy.deepcopy(plain)
    return initialized(model), model


def assigned_in_context(dtype: torch.dtype, **options: Any) -> Any:
    plain = Quantized(dtype)
    with torch.device("meta"):
        model = Quantized(dtype)
    with hetero.ZeroInitContext(**options):
        model.load_state_dict(plain.state_dict(), assign=True)
    return initialized(model), model


def assigned_outside(dtype: torch.dtype, **options: Any) -> Any:
    plain = Quantized(dtype)
    with torch.device("meta"):
        model = Quantized(dtype)
    model.load_state_dict(plain.state_dict(), assign=True)
    return initialized(model, **options), model


def converted_after_construction(dtype: torch.dtype, **options: Any) -> Any:
    with hetero.ZeroInitContext(**options):
        model = Quantized(torch.float32)
        model.codes.data = Quantized(dtype).codes.data
    return initialized(model), model


def added_later(dtype: torch.dtype, **options: Any) -> Any:
    model = nn.Module()
    model.first = nn.Linear(16, 16)
    optimizer = initialized(model, **options)
    late = Quantized(dtype)
    model.late = late
    try:
        optimizer.add_param_group({"params": [late.layer.weight, late.layer.bias]})
        if dtype.is_floating_point:
            optimizer.add_param_group({"params": [late.codes]})
    except BaseException:
        optimizer.engine.close()
        raise
    return optimizer, late, model  # for as long as the engine is to live


WAYS = [
    built_in_context,
    built_outside,
    copied_in_context,
    assigned_in_context,
    assigned_outside,
    converted_after_construction,
    added_later,
]
Way = Callable[..., Any]


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_floats_of_8_bits_are_refused_by_name(way: Way, dtype: torch.dtype) -> None:
    name = "a parameter" if way is copied_in_context else "codes"
    fact = rf"{name} of shape \({NUMEL},\) is {dtype}, of 4\.9 KiB \({NUMEL} bytes\)"
    # load_state_dict() makes a RuntimeError of whatever is raised in it.
    kind = RuntimeError if way is assigned_in_context else hetero.HeteroError
    with pytest.raises(kind, match=rf"{fact}.*convert it first.*buffer"):
        way(dtype, placement_policy="cpu")


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", OTHERS)
def test_others_stay_in_ram_and_count(way: Way, dtype: torch.dtype, tmp_path: Path) -> None:
    options = {"placement_policy": "nvme", "nvme_path": tmp_path, "host_memory": "4MiB"}
    optimizer, model, *_ = way(dtype, **options)
    ledger = optimizer.engine.ledger
    assert ledger.used(Tier.HOST, Account.UNMANAGED) == NUMEL * dtype.itemsize
    assert ledger.used(Tier.HOST, Account.INIT) == 0
    assert type(model.codes) is nn.Parameter
    assert torch.equal(model.codes, Quantized(dtype).codes)
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.engine.close()
    assert ledger.in_use_bytes["host"] == 0


def test_the_smallest_budget_has_room_for_them() -> None:
    with pytest.raises(hetero.BudgetError, match="other parameters of this model take") as refused:
        built_outside(torch.int64, placement_policy="cpu", host_memory=NUMEL * 8 + 5000)
    smallest = int(re.findall(r"works is .*?\((\d+) bytes\)", str(refused.value))[0])
    with pytest.raises(hetero.BudgetError, match=f"smallest that works is .*{smallest} bytes"):
        built_outside(torch.int64, placement_policy="cpu", host_memory=smallest - 1)
    optimizer, _ = built_outside(torch.int64, placement_policy="cpu", host_memory=smallest)
    optimizer.engine.close()


@pytest.mark.parametrize("way", [built_in_context, built_outside])
def test_one_that_does_not_fit_alone_is_named(way: Way) -> None:
    fact = rf"codes of shape \({NUMEL},\) is torch.int64 and never moves.*{NUMEL * 8} bytes"
    with pytest.raises(hetero.BudgetError, match=fact):
        way(torch.int64, placement_policy="cpu", host_memory=NUMEL * 8 - 1)


def test_what_is_dropped_while_building_counts_no_more() -> None:
    context = hetero.ZeroInitContext(placement_policy="cpu")
    with context:
        model = Quantized(torch.uint8)
        model.codes = nn.Parameter(torch.zeros(7, dtype=torch.uint8), requires_grad=False)
    assert context.construction.ledger.used(Tier.HOST, Account.UNMANAGED) == 7


def test_a_budget_that_changes_keeps_their_room(tmp_path: Path) -> None:
    options = {"placement_policy": "nvme", "nvme_path": tmp_path, "host_memory": "4MiB"}
    optimizer, _ = built_outside(torch.int64, **options)
    with pytest.raises(hetero.BudgetError, match="smallest that works") as refused:
        optimizer.engine.set_budget(host_memory=NUMEL * 8)
    smallest = int(re.findall(r"works is .*?\((\d+) bytes\)", str(refused.value))[0])
    optimizer.engine.set_budget(host_memory=smallest)
    assert optimizer.engine.ledger.in_use_bytes["host"] <= smallest
    optimizer.engine.close()


def test_one_that_comes_later_and_does_not_fit_changes_nothing() -> None:
    model = nn.Module()
    model.first = nn.Linear(16, 16)
    optimizer = initialized(model, placement_policy="cpu", host_memory=NUMEL * 12)
    before = optimizer.engine.ledger.by_account
    model.late = Quantized(torch.int64)
    with pytest.raises(hetero.BudgetError, match=rf"late\.codes.*{NUMEL * 8} bytes"):
        optimizer.add_param_group({"params": model.late.layer.parameters()})
    assert optimizer.engine.ledger.by_account == before
    assert len(optimizer.param_groups) == 1
    optimizer.engine.close()


def test_on_a_device_they_count_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.config.cuda_available", lambda: True)
    monkeypatch.setattr("hetero.config.CudaBackend", lambda: CudaBackend(FakeRuntime()))
    options = {"placement_policy": "cpu", "backend": "cuda"}
    with pytest.raises(hetero.BudgetError, match="device_memory is .*smallest") as refused:
        built_outside(torch.int64, **options, device_memory=NUMEL * 8)
    smallest = int(re.findall(r"device_memory is .*?works is .*?\((\d+)", str(refused.value))[0])
    assert smallest > NUMEL * 8
    optimizer, _ = built_outside(torch.int64, **options, device_memory=smallest)
    ledger = optimizer.engine.ledger
    assert ledger.used(Tier.DEVICE, Account.UNMANAGED) == NUMEL * 8
    assert ledger.used(Tier.HOST, Account.UNMANAGED) == 0
    optimizer.engine.close()
    assert ledger.in_use_bytes["device"] == 0


def test_complex_numbers_in_an_optimizer_are_refused_by_name() -> None:
    model = Quantized(torch.complex64)
    with pytest.raises(ValueError, match=r"param group 0.*codes.*is torch\.complex64"):
        hetero.initialize(model, hetero.HybridAdam(model.parameters()), placement_policy="cpu")


def test_a_lazy_module_is_refused_by_name() -> None:
    with (
        hetero.ZeroInitContext(placement_policy="cpu"),
        pytest.raises(hetero.HeteroError, match=r"LazyLinear.weight .*no shape yet.*nn.Linear"),
    ):
        nn.LazyLinear(4)
