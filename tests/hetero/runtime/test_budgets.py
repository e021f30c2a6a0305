"""Budgets are never passed, and the peak is what a formula says."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import hetero
from offload.memory.sizes import parse_bytes
from offload.memory.tiers import Account, Tier
from tests.support.training.loops import batches, build, train
from tests.support.training.smallest import smallest_host_memory

# bytes per element of PARAM, GRAD and OPTIM_STATE
STATE_KINDS = {"fp32": (4, 4, 8), "bf16": (2, 2, 10), "fp16": (2, 2, 12)}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_peaks(dtype: str, tmp_path: Path) -> None:
    """In RAM all state; with optimizer states on NVMe buffers for four of them."""
    param, grad, optim_state = STATE_KINDS[dtype]
    for policy in ("cpu", "nvme"):
        model, optimizer = build(
            placement_policy=policy,
            dtype=dtype,
            nvme_path=str(tmp_path),
            initial_loss_scale=64.0,
            debug={"overlap_updates": "none"},
        )
        engine = optimizer.engine
        slots, numel = engine.layout.slot_count, engine.layout.slot_numel
        train(model, optimizer, batches(2))
        optim_states = slots if policy == "cpu" else 4
        assert engine.ledger.peak_bytes == {
            "device": 0,
            "host": numel * (slots * (param + grad) + optim_states * optim_state),
            "disk": 0 if policy == "cpu" else numel * slots * optim_state,
        }


def test_nvme_traffic_is_each_streamed_record_once_each_way(tmp_path: Path) -> None:
    """Optimizer states beyond the buffers are read and written once a step, 10 bytes a
    parameter.
    """
    options = {"dtype": "bf16", "nvme_path": str(tmp_path), "debug": {"overlap_updates": "none"}}
    model, optimizer = build(placement_policy="nvme", **options)
    engine = optimizer.engine
    optim_state_bytes = engine.layout.slot_numel * 10
    slots, kept = engine.layout.slot_count, engine.placement.buffers
    before = engine.traffic
    steps = 3
    for tokens in batches(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.synchronize()
    after = engine.traffic
    assert after.disk_write - before.disk_write == steps * (slots - kept) * optim_state_bytes
    reads = steps * slots - (steps - 1) * kept  # the first step finds nothing in the buffers
    assert after.disk_read - before.disk_read == reads * optim_state_bytes
    engine.close()


@pytest.mark.parametrize(
    ("policy", "dtype", "chunk_numel"),
    [
        ("cpu", "bf16", 20480),
        ("nvme", "fp32", None),
        pytest.param("auto", "bf16", None, marks=pytest.mark.extra),
    ],
)
def test_the_smallest_budget_named_is_the_smallest_that_works(
    policy: str, dtype: str, chunk_numel: int | None, tmp_path: Path
) -> None:
    """tests/zoo/test_smallest_budget.py has many models, and budgets that are not the smallest."""
    options = {"placement_policy": policy, "dtype": dtype, "chunk_numel": chunk_numel}
    if policy != "cpu":
        options["nvme_path"] = str(tmp_path)
    too_little = "90KiB" if policy != "cpu" else "1MiB"
    smallest = smallest_host_memory(lambda: build(host_memory=too_little, **options))
    with pytest.raises(hetero.BudgetError):
        build(host_memory=smallest - 1, **options)
    model, optimizer = build(host_memory=smallest, **options)
    engine = optimizer.engine
    train(model, optimizer, batches(2), clip=1.0)
    assert engine.ledger.peak_bytes["host"] <= smallest


def test_the_graph_of_a_backward_has_room_where_its_refusal_says(tmp_path: Path) -> None:
    """It holds all parameters that it has used, which the smallest budget has no room for."""
    options = {"placement_policy": "nvme", "dtype": "fp32", "nvme_path": str(tmp_path)}

    def penalised(host_memory: int) -> torch.Tensor:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
        model: nn.Module = nn.Sequential(*layers)
        optimizer = hetero.AdamW(model.parameters())
        if host_memory:
            model, optimizer = hetero.initialize(
                model, optimizer, **options, host_memory=host_memory
            )
        try:
            x = torch.ones(4, 64, requires_grad=True)
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            slope.square().sum().backward()
            return model[0][0].weight.grad.clone()
        finally:
            if host_memory:
                optimizer.engine.close()

    smallest = smallest_host_memory(lambda: penalised(16384))
    with pytest.raises(hetero.BudgetError, match="no room for the chunk") as refusal:
        penalised(smallest)
    more = re.search(r"for all chunks at once by ([\d.]+ KiB)", str(refusal.value))
    assert more is not None
    found = penalised(smallest + parse_bytes(more[1].replace(" ", "")))
    torch.testing.assert_close(found, penalised(0))


def test_a_gradient_in_fp16_is_changed_within_the_smallest_device_memory(tmp_path: Path) -> None:
    """It is read in fp32, and kept in fp16."""
    options = {"placement_policy": "nvme", "backend": "emulated", "dtype": "fp16"}
    options |= {"nvme_path": str(tmp_path), "host_memory": "1MiB", "chunk_numel": 4096}

    def build(device_memory: int) -> tuple[nn.Module, hetero.AdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        optimizer = hetero.AdamW(model.parameters())
        return hetero.initialize(model, optimizer, **options, device_memory=device_memory)

    with pytest.raises(hetero.BudgetError) as refusal:
        build(1)
    model, optimizer = build(refusal.value.smallest_device_bytes)
    optimizer.backward(model(torch.ones(2, 64).half()).float().square().sum())
    for param in model.parameters():
        before = param.grad.clone()
        param.grad.add_(1.0)
        assert torch.equal(param.grad.clone(), (before + 1.0).half().float())
    optimizer.step()
    optimizer.engine.close()


def test_disk_budget_too_small_says_so(tmp_path: Path) -> None:
    with pytest.raises(hetero.BudgetError, match="nvme_capacity.* bytes\\) go to disk"):
        build(placement_policy="nvme", nvme_path=str(tmp_path), nvme_capacity="1MiB")


def test_room_for_gradients_is_charged_before_they_come() -> None:
    """Or what is only to spare, for gathered copies say, could take it."""
    model, optimizer = build(placement_policy="cpu", dtype="bf16")
    ledger = optimizer.engine.ledger
    charged = ledger.used(Tier.HOST, Account.GRAD)
    assert charged > 0
    assert ledger.used(Tier.HOST, Account.INIT) == 0
    tokens = batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert ledger.used(Tier.HOST, Account.GRAD) == charged
    optimizer.engine.close()


def linear_on_disk(tmp_path: Path) -> tuple[torch.nn.Module, hetero.HybridAdam]:
    """8 M parameters after a step, whose optimizer states (80 MiB) fit in the budget."""
    with hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=str(tmp_path), host_memory="256MiB"
    ):
        model = torch.nn.Linear(2048, 4096)
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    optimizer.backward(model(torch.ones(1, 2048, dtype=torch.bfloat16)).float().sum())
    optimizer.step()
    return model, optimizer


def test_close_gives_the_memory_back_while_the_engine_is_still_held(tmp_path: Path) -> None:
    model, optimizer = linear_on_disk(tmp_path)
    engine = optimizer.engine
    held_bytes = engine.ledger.in_use_bytes["host"]
    assert held_bytes > 100 << 20
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    engine.close()
    assert before_bytes - process.memory_info().rss > 0.9 * held_bytes
    assert engine.ledger.in_use_bytes["host"] == 0
    del model


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_keeps_an_engine_that_is_dropped(closed: bool, tmp_path: Path) -> None:
    model, optimizer = linear_on_disk(tmp_path)
    engine = weakref.ref(optimizer.engine)
    if closed:
        optimizer.engine.close()
    del model, optimizer
    gc.collect()
    gc.collect()  # what the end of the model has let go of
    assert engine() is None
