"""HybridMuon beside torch.optim.Muon, bit for bit, on every tier; and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.api.loaded_state import momentum_sum
from hetero.chunk_groups import muon_directions
from tests.support.training.pair import Pair
from tests.support.training.small_net import SETTINGS, Settings

pytestmark = pytest.mark.usefixtures("nothing_left")

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"lr": 0.02},
    "plain": {"lr": 0.02, "nesterov": False, "weight_decay": 0.0},
    "rms": {"lr": 0.005, "momentum": 0.3, "adjust_lr_fn": "match_rms_adamw"},
    "no momentum": {"lr": 0.02, "momentum": 0.0},
    "steps": {"lr": 0.02, "momentum": 0.5, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
}


class Net(nn.Module):
    """Matrices wide, tall and square, and what is none."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 16)
        self.tall = nn.Linear(16, 96)
        self.square = nn.Linear(96, 96)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.square(torch.tanh(self.tall(torch.tanh(self.wide(x)))))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Its matrices, and the others."""
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


def pair_of(settings: Settings, path: Path, options: dict[str, Any]) -> Pair:
    def make(model: nn.Module, managed: bool) -> list[torch.optim.Optimizer]:
        matrices, others = split(model)
        if managed:
            return [hetero.HybridMuon(matrices, **options), hetero.HybridSGD(others, lr=0.1)]
        return [torch.optim.Muon(matrices, **options), torch.optim.SGD(others, lr=0.1)]

    more = {"host_memory": "256KiB"} if "host_memory" in settings else {}  # of two chunk groups
    return Pair(Net, make, settings, path, **more)


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_has_torchs_bits(options: dict[str, Any], settings: Settings, tmp_path: Path) -> None:
    pair = pair_of(settings, tmp_path, options)
    for seed in range(4):
        pair.step(seed, loss_of)
    pair.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_with_micro_batches_clipping_and_schedulers(settings: Settings, tmp_path: Path) -> None:
    pair = pair_of(settings, tmp_path, OPTIONS["default"])
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
        for optimizers in (pair.ours, pair.theirs)
    ]
    for seed in range(4):
        for model, _ in pair.sides():
            for micro in range(2):
                loss_of(model, seed + 100 * micro).backward()
        params = list(pair.model.parameters())
        factor = 0.01 / (pair.engine.grad_norm(params) + 1e-6)
        assert factor < 1
        hetero.clip_grad_norm_(params, 0.01)
        for param in pair.plain.parameters():  # by the same factor: torch sums squares in fp32
            if param.grad is not None:
                param.grad.mul_(factor)
        for (_, optimizers), scheduler in zip(pair.sides(), schedulers, strict=True):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
    pair.close()


def managed(path: Path, **settings: Any) -> tuple[nn.Module, hetero.HybridMuon]:
    """Matrices alone, so that there is one optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False), nn.Tanh()
    )
    state_dtype = settings.pop("state_dtype", "fp32")
    optimizer = hetero.HybridMuon(model.parameters(), lr=0.02, state_dtype=state_dtype)
    given = {"nvme_path": str(path), "chunk_numel": 4096, **settings}
    return hetero.initialize(model, optimizer, **given)


def trained(path: Path, steps: int = 3, **settings: Any) -> list[torch.Tensor]:
    """Masters and momentum after some steps."""
    model, optimizer = managed(path, **settings)
    for seed in range(steps):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, seed))
        optimizer.step()
    states = optimizer.state_dict()["state"].values()
    found = [s["momentum_buffer"] for s in states] + hetero.masters(model.parameters())
    optimizer.engine.close()
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_bits_are_the_same_in_every_place(dtype: str, state_dtype: str, tmp_path: Path) -> None:
    """Also with gradients on disk, updates that overlap, and tiles that cut matrices."""
    common = {"dtype": dtype, "state_dtype": state_dtype, "initial_loss_scale": 256.0}
    wanted = trained(tmp_path, placement_policy="cpu", **common)
    disk = {"placement_policy": "nvme", "host_memory": "300KiB"}
    for settings in (
        {**disk, "debug": {"overlap_updates": "both"}} if dtype != "fp16" else disk,
        {**disk, "debug": {"overlap_updates": "forward"}, "chunk_numel": 8192},
        {**disk, "backend": "emulated", "device_memory": "300KiB"},
    ):
        found = trained(tmp_path, **{**common, **settings})
        assert all(map(torch.equal, found, wanted)), settings


def test_bf16_equals_a_loop_with_fp32_masters(tmp_path: Path) -> None:
    """But for the bit of the momentum that masters take."""
    model, optimizer = managed(tmp_path, placement_policy="cpu", dtype="bf16")
    masters = hetero.masters(model.parameters())
    plain = nn.Sequential(
        nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False), nn.Tanh()
    ).bfloat16()
    plain.load_state_dict(model.state_dict())
    reference = torch.optim.Muon([nn.Parameter(m) for m in masters], lr=0.02)
    for seed in range(4):
        for each in (model, plain):
            loss_of(each, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        params = reference.param_groups[0]["params"]
        for param, own in zip(params, plain.parameters(), strict=True):
            param.grad = own.grad.float()
            state = reference.state[param]
            if "momentum_buffer" in state:
                bits = state["momentum_buffer"].view(torch.int32)
                bits.bitwise_and_(~1)
        reference.step()
        for param, own in zip(params, plain.parameters(), strict=True):
            own.data.copy_(param)
            own.grad = None
        found = hetero.masters(model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(found, params, strict=True))
    optimizer.engine.close()


def test_state_passes_the_disk_once_each_way(tmp_path: Path) -> None:
    """The second pass finds what the first one has read; nothing is written in between."""
    model, optimizer = managed(
        tmp_path, placement_policy="nvme", host_memory="300KiB", dtype="fp32"
    )
    pipeline = optimizer.engine.chunk_groups[0].pipeline
    before = dict(pipeline.stats)
    for seed in range(4):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
    tiles = sum(c.slots for c in optimizer.engine.chunk_groups[0].layout.chunks)
    tile_bytes = optimizer.engine.chunk_groups[0].layout.tile_numel * 4
    moved = {name: pipeline.stats[name] - before[name] for name in before}
    assert moved["tasks"] == 4 * 2 * tiles
    # Momentum and, if it is there, the parameter of each tile.
    assert moved["read_bytes"] <= 4 * tiles * 2 * tile_bytes
    assert moved["written_bytes"] <= 4 * tiles * 2 * tile_bytes
    optimizer.engine.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_failure_between_the_passes_ends_the_engine(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum that is a step ahead of its parameters must not go on unnoticed."""
    model, optimizer = managed(tmp_path, **{"dtype": "fp32", **settings})
    loss_of(model, 0).backward()

    def fail(*args: object) -> torch.Tensor:
        raise MemoryError("no room for the products")

    with monkeypatch.context() as patch:
        patch.setattr(muon_directions, "newton_schulz", fail)
        with pytest.raises(MemoryError, match="no room"):
            optimizer.step()
    with pytest.raises(RuntimeError, match="ended in the middle.*no room"):
        loss_of(model, 1).backward()
        optimizer.step()
    optimizer.engine.close()


def test_state_goes_to_torch_and_back(tmp_path: Path) -> None:
    pair = pair_of({"placement_policy": "cpu"}, tmp_path, OPTIONS["default"])
    for seed in range(2):
        pair.step(seed, loss_of)
    own = pair.ours[0].state_dict()
    pair.theirs[0].load_state_dict(copy.deepcopy(own))  # torch goes on in the same tensors
    pair.step(2, loss_of)
    pair.assert_same()
    pair.ours[0].load_state_dict(own)  # back by one step, with its masters
    assert torch.equal(pair.ours[0].state_dict()["state"][0]["master"], own["state"][0]["master"])
    for seed in range(9, 11):  # away from torch's
        loss_of(pair.model, seed).backward()
        for optimizer in pair.ours:
            optimizer.step()
            optimizer.zero_grad()
    pair.model.load_state_dict(pair.plain.state_dict())
    pair.ours[0].load_state_dict(pair.theirs[0].state_dict())
    pair.step(3, loss_of)
    pair.close()


def test_masters_are_known_again_with_any_number_of_threads() -> None:
    """Sums of floating-point numbers depend on their order, and that on the threads."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-6, 3, 512).unsqueeze(1)
    momentum = torch.randn(512, 512, generator=generator) * scales
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3, 4, 8):
            torch.set_num_threads(threads)
            found.add(momentum_sum(momentum))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    momentum[3, 5] = torch.nextafter(momentum[3, 5], torch.tensor(1e9))
    assert momentum_sum(momentum) not in found


def test_a_state_that_is_loaded_before_initialize_is_only_looked_at(tmp_path: Path) -> None:
    model, optimizer = managed(tmp_path, placement_policy="cpu", dtype="fp32")
    loss_of(model, 0).backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.engine.close()
    state["state"][0]["momentum_buffer"] += 1  # as if torch had trained on
    early = hetero.HybridMuon(
        [nn.Parameter(torch.zeros(96, 64)), nn.Parameter(torch.zeros(64, 96))]
    )
    early.load_state_dict(state)
    saved = state["state"][0]["momentum_sum"]
    assert early.state_dict()["state"][0]["momentum_sum"] == saved
    assert state["state"][0]["momentum_sum"] == saved


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"lr": -1.0}, "lr must be a finite number, 0 or more"),
        ({"momentum": 1.5}, "momentum must be from 0 to 1"),
        ({"eps": 0.0}, "eps must be more than 0"),
        ({"ns_steps": 100}, "ns_steps must be a whole number from 1 to 99"),
        ({"ns_steps": 2.5}, "ns_steps must be a whole number"),
        ({"ns_coefficients": (1.0, 2.0)}, "three finite numbers"),
        ({"ns_coefficients": (1.0, 2.0, float("nan"))}, "three finite numbers"),
        ({"adjust_lr_fn": "adam"}, "adjust_lr_fn must be None, 'original' or"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        hetero.HybridMuon([nn.Parameter(torch.zeros(4, 4))], **options)


def test_what_is_no_matrix_is_refused() -> None:
    for param in (nn.Linear(2, 2).bias, nn.Conv1d(2, 2, 2).weight):
        with pytest.raises(ValueError, match="HybridMuon updates matrices, and got a parameter of"):
            hetero.HybridMuon([param])
    for wrong in ({nn.Parameter(torch.zeros(2, 2))}, [1]):
        with pytest.raises(TypeError):
            hetero.HybridMuon([{"params": wrong}])
    optimizer = hetero.HybridMuon(nn.Linear(2, 2, bias=False).named_parameters())
    with pytest.raises(ValueError, match="give it to another optimizer"):
        optimizer.add_param_group({"params": nn.LayerNorm(2).weight})
    assert len(optimizer.param_groups) == 1
