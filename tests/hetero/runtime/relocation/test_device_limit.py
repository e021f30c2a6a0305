"""What a device holds altogether: homes leave it when steps need more of it than they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from offload.device.cuda_backend import CudaBackend
from offload.errors import BudgetError
from offload.memory.tiers import Tier
from tests.support.native.fake_cuda import FakeRuntime
from tests.support.training.loops import batches, build

pytestmark = pytest.mark.usefixtures("nothing_left")

TOTAL = 4 << 20  # of the device, which is more than all state takes
RESERVE = TOTAL // 32
STEPS = 8


class Device:
    """A device, and what steps take of it beside the state."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime(total=TOTAL)

    def train(self, path: Path, *activations: int, **options: Any) -> tuple[Any, Any, list[Any]]:
        """Steps that take so many bytes each; what trained, and (budget, homes) after each."""
        given = {"chunk_numel": 4096, "nvme_path": str(path), "dtype": "bf16"}
        given |= {"backend": "cuda", "host_memory": "16MiB"}
        model, optimizer = build(**{**given, **options})
        engine = optimizer.engine
        seen = []
        for number, nbytes in enumerate(activations):
            x = batches(STEPS)[number]
            loss = model(input_ids=x, labels=x).loss
            held = self.runtime.empty(nbytes)
            optimizer.backward(loss)
            del held, loss
            optimizer.step()
            optimizer.zero_grad()
            budget = engine.ledger.budget_bytes["device"]
            seen.append((budget, engine.placement.param.count(Tier.DEVICE)))
            assert engine.ledger.in_use_bytes["device"] <= budget
        return model, optimizer, seen


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("hetero.config.cuda_available", lambda: True)
    monkeypatch.setattr(
        "hetero.config.default_device_bytes", lambda *_: int(0.5 * made.runtime.memory()[0])
    )
    monkeypatch.setattr("hetero.config.CudaBackend", lambda: CudaBackend(made.runtime))
    return made


def finish(optimizer: Any) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    masters = hetero.masters(params)
    optimizer.engine.close()
    return masters


def expected(steps: int) -> list[torch.Tensor]:
    """The same training in RAM."""
    model, optimizer = build(placement_policy="cpu", dtype="bf16")
    for x in batches(STEPS)[:steps]:
        optimizer.backward(model(input_ids=x, labels=x).loss)
        optimizer.step()
        optimizer.zero_grad()
    return finish(optimizer)


@pytest.mark.parametrize("device_memory", ["auto", pytest.param(None, marks=pytest.mark.extra)])
def test_what_steps_leave_is_used_and_given_back(
    device: Device, device_memory: str | None, tmp_path: Path
) -> None:
    small, large = 100 << 10, 1480 << 10
    options: dict[str, Any] = {"device_memory": device_memory}
    _model, optimizer, seen = device.train(
        tmp_path, *[small] * 4, large, large, large, small, **options
    )
    engine = optimizer.engine
    budgets, homes = zip(*seen, strict=True)
    all_homes = len(engine.layout.chunks)
    assert budgets[0] == TOTAL // 2, "nobody knows what steps take"
    assert homes[0] < all_homes
    assert budgets[1] == budgets[2] == budgets[3] > budgets[0]
    assert homes[1] == homes[3] == all_homes
    usable = TOTAL - RESERVE
    assert budgets[1] <= usable - usable // 64 - small
    assert budgets[1] > usable - usable // 64 - small - (64 << 10)
    # What fits beside it is left; and it does not go on shrinking, nor grow again.
    assert budgets[4] == budgets[5] == budgets[6] == budgets[7] < budgets[1]
    assert budgets[4] <= usable - usable // 64 - large
    assert 0 < homes[4] < all_homes
    assert [change.step for change in engine.changes] == [2, 5]
    assert engine.changes[1].routes[Tier.DEVICE, Tier.HOST]
    assert "device_memory is" in engine.changes[1].words()
    assert all(map(torch.equal, finish(optimizer), expected(8)))


def test_a_number_that_was_given_is_a_most(device: Device, tmp_path: Path) -> None:
    given = 1 << 20
    _model, optimizer, seen = device.train(
        tmp_path, *[10 << 10] * 3, 3100 << 10, 3100 << 10, device_memory=given
    )
    budgets = [budget for budget, _ in seen]
    assert budgets[:3] == [given] * 3
    assert budgets[3] == budgets[4] < given
    assert all(map(torch.equal, finish(optimizer), expected(5)))


def test_what_cannot_fit_is_refused_with_the_numbers(device: Device, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"the device may hold altogether is 3.9 MiB") as error:
        device.train(tmp_path, 10 << 10, TOTAL - (120 << 10), device_memory=150 << 10)
    assert "this step was made" in str(error.value)


def test_what_is_in_use_leaves_after_a_later_step(device: Device, tmp_path: Path) -> None:
    model, optimizer, _ = device.train(tmp_path, 10 << 10, 10 << 10, 10 << 10)
    engine = optimizer.engine
    param = next(model.parameters())
    placed = engine.placement
    for number in range(2):
        mine = None if number else param.detach()
        x = batches(STEPS)[3 + number]
        loss = model(input_ids=x, labels=x).loss
        held = device.runtime.empty(1480 << 10)
        optimizer.backward(loss)
        del held, loss
        optimizer.step()
        optimizer.zero_grad()
        assert (engine.placement == placed) == (mine is not None)
        del mine
    assert all(map(torch.equal, finish(optimizer), expected(5)))


def test_auto_is_for_devices_that_can_be_asked() -> None:
    with pytest.raises(ValueError, match="needs device_memory"):
        hetero.Config(backend="emulated", device_memory="auto")
    assert hetero.Config(device_memory="auto").device_bytes is None
