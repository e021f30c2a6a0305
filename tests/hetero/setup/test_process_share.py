"""hetero/setup/process_share: a process_memory that is too small is refused in its own words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from offload.memory.process_memory import peak_resident_bytes, resident_bytes
from tests.support.ranks.processes import run_forked


def smallest(error: pytest.ExceptionInfo[BaseException]) -> int:
    """The process_memory that a refusal asks for."""
    found = re.search(r"raise process_memory to .* \((\d+) bytes\) at least", str(error.value))
    assert found is not None, str(error.value)
    return int(found[1])


@pytest.mark.parametrize(
    ("policy", "what"),
    [("nvme", "a model with parameters like those so far"), ("cpu", "what is built so far")],
)
def test_less_than_the_process_holds(policy: str, what: str, tmp_path: Path) -> None:
    before = resident_bytes()
    nvme_path = str(tmp_path) if policy == "nvme" else None
    with (
        pytest.raises(hetero.BudgetError) as error,
        hetero.ZeroInitContext(
            process_memory="64MiB", placement_policy=policy, nvme_path=nvme_path
        ),
    ):
        nn.Linear(512, 512, bias=False)
    said = str(error.value)
    assert "process_memory is 64.0 MiB (67108864 bytes), and without model state" in said
    assert f"3/4 of the rest, 0 B, may become model state before the first step, and {what}" in said
    takes = re.search(rf"{what} takes .* \((\d+) bytes\); raise", said)
    assert takes is not None
    assert int(takes[1]) == 1 << 20 or policy == "nvme"
    assert "host" not in said
    assert said.count(what) == 1
    assert smallest(error) >= before + (1 << 20) * 4 // 3


def test_a_model_that_does_not_fit_says_what_does(tmp_path: Path) -> None:
    def build(process_memory: int) -> None:
        options = {"placement_policy": "nvme", "nvme_path": str(tmp_path)}
        with hetero.ZeroInitContext(process_memory=process_memory, **options):
            model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        _, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
        optimizer.engine.close()

    before = resident_bytes()
    with pytest.raises(
        hetero.PlacementError, match="process_memory is .* the least placement of the model"
    ) as error:
        build(before + (7 << 20))
    # The process has grown meanwhile, by the model that was refused at least.
    build(smallest(error) + max(0, resident_bytes() - before))


def test_a_small_host_memory_is_what_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(hetero.BudgetError, match="host_memory must be at least"),
        hetero.ZeroInitContext(
            process_memory=resident_bytes() + (1 << 30),
            host_memory="100KiB",
            placement_policy="cpu",
        ),
    ):
        nn.Linear(512, 512)


def test_the_systems_limit_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.config.allowed_bytes", lambda: 64 << 20)
    with (
        pytest.raises(hetero.BudgetError, match="'auto', the system's limit, is 64.0 MiB.*cgroup"),
        hetero.ZeroInitContext(process_memory="auto", placement_policy="cpu"),
    ):
        nn.Linear(512, 512)


@pytest.mark.parametrize("limit", ["process_memory", "host_memory"])
def test_the_smallest_that_works_does_with_activations_that_have_a_share(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more RAM activations have more: what is said counts that."""
    monkeypatch.setattr("hetero.setup.process_share.resident_bytes", lambda: 0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(64)))

    def place(nbytes: int) -> None:
        optimizer = hetero.HybridAdam(model.parameters())
        options = {limit: nbytes, "activation_memory": "auto", "placement_policy": "cpu"}
        hetero.initialize(model, optimizer, **options)
        optimizer.engine.close()

    with pytest.raises(hetero.PlacementError) as error:
        place(24 << 20)
    numbers = [int(found) for found in re.findall(r"\((\d+) bytes\)", str(error.value))]
    place(numbers[-1])


def build_with_buffers(nvme_path: str) -> int:
    """Bytes by which this process has passed its limit."""
    limit = resident_bytes() + (50 << 20)
    kept = []
    with hetero.ZeroInitContext(placement_policy="nvme", nvme_path=nvme_path, process_memory=limit):
        model = nn.Sequential()
        for _ in range(10):
            model.append(nn.Linear(1024, 1024, bias=False))
            kept.append(torch.ones(3 << 20, dtype=torch.uint8))
    return peak_resident_bytes() - limit


def test_what_modules_hold_beside_parameters_is_made_room_for(tmp_path: Path) -> None:
    """30 MiB of buffers, say, beside 40 MiB of parameters, of which a part goes to disk."""
    assert run_forked(build_with_buffers, str(tmp_path)) <= 0


def test_a_limit_that_was_passed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = resident_bytes() + (1 << 30)
    with hetero.ZeroInitContext(
        process_memory=limit, placement_policy="nvme", nvme_path=str(tmp_path)
    ):
        model = nn.Linear(64, 64)
    monkeypatch.setattr("hetero.setup.process_share.peak_resident_bytes", lambda: limit + 4096)
    _, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    told = [note for note in optimizer.engine.notes if "passed process_memory" in note]
    assert len(told) == 1
    assert f"({limit + 4096} bytes), by the kernel's count, and may hold" in told[0]
    optimizer.engine.close()
