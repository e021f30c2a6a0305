"""hetero/api/module_state_dict: what plain PyTorch's state dict has, in storages of its own."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import nn

import hetero
from tests.support.late import late
from tests.support.training.small_net import SETTINGS, Settings, loss_of, managed
from tests.support.training.small_net import plain as plain_net

accelerate = late("accelerate")

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.parametrize("settings", SETTINGS),
]


class Tied(nn.Module):
    """An embedding whose weight is the head's, and modules of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.embedding = nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(self.embedding(x))))


def tied(settings: Settings, path: Path) -> tuple[Tied, hetero.HybridAdam]:
    torch.manual_seed(0)
    model = Tied()
    return hetero.initialize(
        model,
        hetero.HybridAdam(model.parameters(), lr=1e-2),
        dtype="fp32",
        nvme_path=str(path),
        chunk_numel=4096,
        **settings,
    )


def plain() -> Tied:
    torch.manual_seed(0)
    return Tied()


def test_entries_have_storages_of_their_own(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = tied(settings, tmp_path)
    found, expected = model.state_dict(), plain().state_dict()
    assert list(found) == list(expected)
    storages = {}
    for name, value in found.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, expected[name])
        assert value.untyped_storage().nbytes() == value.nbytes
        storages.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    several = [names for names in storages.values() if len(names) > 1]
    assert several == [["embedding.weight", "head.weight"]]
    resident = settings["placement_policy"] == "cpu"
    home = model.norm.weight.detach().data_ptr() if resident else None
    assert not resident or found["norm.weight"].data_ptr() == home, "no copy"
    again = model.state_dict()
    assert resident or again["head.weight"] is not found["head.weight"]
    optimizer.engine.close()


def test_values_where_torch_functions_are_disabled(settings: Settings, tmp_path: Path) -> None:
    """There a parameter gives torch the memory of its stand-in, which has a single element."""
    model, optimizer = managed(settings, tmp_path)  # (a parameter has a single one, too)
    with torch._C.DisableTorchFunctionSubclass():
        found = model.state_dict()
    assert all(torch.equal(found[n], value) for n, value in plain_net()[0].state_dict().items())
    optimizer.engine.close()


def test_what_torch_saves_of_one_layer(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = tied(settings, tmp_path)
    sizes = []
    for each in (model, plain()):
        buffer = io.BytesIO()
        torch.save(each.norm.state_dict(), buffer)
        sizes.append(buffer.tell())
    assert sizes[0] == sizes[1]
    optimizer.engine.close()


def test_safetensors_of_a_model(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = tied(settings, tmp_path)
    expected = plain()
    for name, each in (("found", model), ("expected", expected)):
        loss_of(each).backward()
        save_model(each, str(tmp_path / name))
    found, wanted = load_file(tmp_path / "found"), load_file(tmp_path / "expected")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with torch.no_grad():
        for each in (model, expected):
            for param in each.parameters():
                param.zero_()
    assert load_model(model, tmp_path / "expected") == (set(), [])
    for param, value in zip(model.parameters(), plain().parameters(), strict=True):
        assert torch.equal(param, value)
    optimizer.engine.close()


def test_accelerate_saves_and_loads_all(settings: Settings, tmp_path: Path) -> None:
    """Model, optimizer and random numbers: two further steps are the same after loading."""
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = tied(settings, tmp_path / "..")
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(seed: int) -> None:
        torch.manual_seed(seed)
        accelerator.backward((model(torch.randn(4, 64)) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    accelerator.save_state(str(tmp_path / "state"))
    found: list[list[torch.Tensor]] = []
    for _ in range(2):
        for seed in (1, 2):
            step(seed)
        found.append(hetero.masters(model.parameters()))
        accelerator.load_state(str(tmp_path / "state"))
    assert all(map(torch.equal, *found))
    optimizer.optimizer.engine.close()
