"""Training on a device whose type is not "cpu": the bits of plain PyTorch on that device.

It is a device of the tests' own over PrivateUse1 (tests/native/torch_device), so that what depends
on a tensor's device is executed without a GPU: autocast, pinned RAM, generators, autograd's thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetero
from hetero.reporting.recorder import Recorder, facts_of
from offload.memory.tiers import Tier
from tests.support.native import torch_device
from tests.support.native.torch_device import NAME, counts, device_of_hetero, join
from tests.support.ranks.processes import run_forked
from tests.support.recompute import latest
from tests.support.training.plain_adam import OPTIONS, PlainAdam

VOCABULARY, WIDTH, LENGTH, STEPS = 96, 48, 16, 3
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    """Attention and two layers, with dropout in and after both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mixed(self.norm(x)).chunk(3, dim=-1)
        p = 0.1 if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.dropout(attended)
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    """A language model with tied weights, a parameter of one element and a buffer.

    `tiled`: its loss is hetero's, which never has all logits.
    """

    def __init__(self, tiled: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH) * 0.1)
        self.tiled = tiled

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        x = x + self.positions.to(x.dtype)  # type: ignore[operator]
        for block in self.blocks:
            x = block(x)
        x, labels = x[:, :-1], tokens[:, 1:]
        if self.tiled:
            return hetero.tiled_cross_entropy(x, self.head.weight, labels, tile_tokens=16)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        library: of the device.
        path: a folder.
        settings: of hetero.
        dtype: of compute.
        autocast: the dtype that the device's operators cast to, if any.
        accumulate: micro-batches a step.
        tiled: Net's.
        runtime: of torch_device.RUNTIMES.
    """

    library: Path
    path: Path
    settings: dict[str, Any]
    dtype: str = "bf16"
    autocast: torch.dtype | None = None
    accumulate: int = 1
    tiled: bool = False
    runtime: str = "late"

    def build(self) -> tuple[Net, hetero.HybridAdam]:
        """By hetero, of seed 0. Random numbers go on from seed 1."""
        torch.manual_seed(0)
        given = {"backend": "cuda", "device_memory": "256KiB", "chunk_numel": 4096}
        given |= {"nvme_path": str(self.path), **self.settings}
        with hetero.ZeroInitContext(dtype=self.dtype, **given):
            model = Net(self.tiled)
        optimizer = hetero.HybridAdam(model.parameters(), **OPTIONS)
        model, optimizer = hetero.initialize(model, optimizer)
        torch.manual_seed(1)
        return model, optimizer

    def casts(self) -> AbstractContextManager[Any]:
        """Inside, forward does as in the training."""
        return nullcontext() if self.autocast is None else torch.autocast(NAME, self.autocast)

    def steps(self, model: Net, optimizer: Any, numbers: range) -> list[torch.Tensor]:
        """Trains by hetero; returns the losses."""
        found = []
        for number in numbers:
            for tokens in batches(number, self.accumulate):
                with self.casts():
                    loss = model(tokens)
                assert loss.device.type == NAME
                optimizer.backward(loss / self.accumulate)
                found.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
        return found


@dataclass
class Trained:
    """What a training gave, all on the CPU."""

    losses: list[torch.Tensor] = field(default_factory=list)
    masters: list[torch.Tensor] = field(default_factory=list)

    def check_same(self, other: Trained) -> None:
        for name in ("losses", "masters"):
            mine, others = getattr(self, name), getattr(other, name)
            assert len(mine) == len(others)
            for one, another in zip(mine, others, strict=True):
                assert torch.equal(one, another), (name, one, another)


def batches(step: int, count: int) -> list[torch.Tensor]:
    """Of tokens, in RAM."""
    generator = torch.Generator().manual_seed(step)
    return list(torch.randint(0, VOCABULARY, (count, 4, LENGTH), generator=generator))


def in_plain_torch(case: Case) -> tuple[Net, PlainAdam, torch.device]:
    """As Case.build(), by plain PyTorch, and the device. Only the update is hetero's, as it is
    documented, of masters in RAM."""
    device = join(case.library)
    torch.manual_seed(0)
    model = Net(case.tiled)
    optimizer = PlainAdam()
    for param in model.parameters():
        optimizer.add(param)
    model.to(device)
    for param in model.parameters():
        param.data = param.data.to(TORCH_DTYPES[case.dtype])
    assert set(optimizer.masters) == set(model.parameters())
    torch.manual_seed(1)
    return model, optimizer, device


def by_torch(case: Case) -> Trained:
    """The same training by plain PyTorch on the device."""
    model, optimizer, device = in_plain_torch(case)
    run = Trained()
    for number in range(STEPS):
        for tokens in batches(number, case.accumulate):
            with case.casts():
                loss = model(tokens.to(device))
            (loss / case.accumulate).backward()
            run.losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    run.masters = [master.weight for master in optimizer.masters.values()]
    return run


def by_hetero(case: Case) -> Trained:
    """The training by hetero, and what must hold besides."""
    with device_of_hetero(case.library, case.runtime) as runtime:
        model, optimizer = case.build()
        engine = optimizer.engine
        pinned = counts().pinned
        run = Trained(case.steps(model, optimizer, range(STEPS)))
        assert counts().pinned > pinned, "inputs come to the device by way of pinned RAM"
        run.masters = hetero.masters(model.parameters())
        assert {p.device for p in model.parameters()} == {engine.backend.device}
        assert model.positions.device == engine.backend.device
        kept = sum(tier is Tier.DEVICE for tier in engine.placement.param)
        assert (engine.traffic.h2d > 0) == (kept < len(engine.placement.param))
        if "recompute" in case.settings:
            assert any(latest(engine).recomputed)
        elif "activation_memory" in case.settings:
            assert engine.traffic.activations_h2d > 0
        engine.close()
        assert set(engine.ledger.in_use_bytes.values()) == {0}
        assert runtime.page_locked == {}
        if case.runtime == "late":
            assert runtime.taken == {}
    return run


def check_same_bits(case: Case) -> None:
    """Losses and masters are those of plain PyTorch."""
    wanted = by_torch(case)
    assert counts().random > 0, "dropout draws from the device's generator"
    by_hetero(case).check_same(wanted)


def check_going_on(case: Case) -> None:
    """What is loaded, by the same engine and by another one, goes on as what was saved: random
    numbers of the device's generator, and of one that the loop has, too."""
    saved = case.path / "saved"
    with device_of_hetero(case.library, case.runtime):
        noise = torch.Generator(NAME).manual_seed(7)

        def rest(model: Net, optimizer: Any) -> list[torch.Tensor]:
            found = case.steps(model, optimizer, range(2, 4))
            found.append(torch.rand(3, generator=noise, device=NAME).cpu())
            return found + hetero.masters(model.parameters())

        model, optimizer = case.build()
        case.steps(model, optimizer, range(2))
        torch.rand(3, generator=noise, device=NAME)
        hetero.save(saved, model, optimizer, extra={"noise": noise})
        wanted = rest(model, optimizer)
        for fresh in (False, True):
            if fresh:
                optimizer.engine.close()
                model, optimizer = case.build()
                noise.manual_seed(0)
            hetero.load(saved, model, optimizer, extra={"noise": noise})
            for one, other in zip(rest(model, optimizer), wanted, strict=True):
                assert torch.equal(one, other), (fresh, one, other)
        optimizer.engine.close()


def check_scaler(case: Case) -> None:
    """torch.amp.GradScaler of the device's kind, with steps that it leaves out."""
    with device_of_hetero(case.library, case.runtime):
        model, optimizer = case.build()
        scaler = torch.amp.GradScaler(NAME, init_scale=2.0**20, growth_interval=2)
        scales, losses = [], []
        for number in range(3 * STEPS):
            loss = model(batches(number, 1)[0])
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        masters = hetero.masters(model.parameters())
        optimizer.engine.close()
    plain, adam, device = in_plain_torch(case)
    left_out = 0
    for number, scale in enumerate(scales):
        loss = plain(batches(number, 1)[0].to(device))
        assert torch.equal(loss.detach().cpu(), losses[number])
        (loss * scale).backward()
        if all(p.grad is None or p.grad.isfinite().all() for p in plain.parameters()):
            adam.step(1 / scale)
        else:
            left_out += 1
        adam.zero_grad()
    assert 0 < left_out < len(scales)
    for master, mine in zip(adam.masters.values(), masters, strict=True):
        assert torch.equal(master.weight, mine)


def check_uses(case: Case) -> None:
    """Evaluation, weights that go out and come back, and a write, all as plain PyTorch's."""
    device = join(case.library)
    with device_of_hetero(case.library, case.runtime):
        model, optimizer = case.build()
        case.steps(model, optimizer, range(1))
        plain = Net().to(TORCH_DTYPES[case.dtype]).to(device)
        plain.load_state_dict(model.state_dict())
        tokens = batches(5, 1)[0]
        for each in (model, plain):
            each.eval()
        with torch.no_grad():
            assert torch.equal(model(tokens), plain(tokens.to(device)))
            with hetero.gathered(model.scale, modifier_rank=0):
                assert model.scale.device == device
                model.scale.fill_(3.0)
            plain.scale.fill_(3.0)
            assert torch.equal(model(tokens), plain(tokens.to(device)))
            plain.head.weight.mul_(0.5)
            model.load_state_dict(plain.state_dict())
            assert torch.equal(model(tokens), plain(tokens.to(device)))
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        before = counts().crossed
        hetero.masters(model.parameters())
        if case.settings == ALL_THERE:
            # The parameter, the rest of its master, and the state that has the carry; back nothing.
            numel = sum(param.numel() for param in model.parameters())
            assert counts().crossed - before == (2 + 2 + 4) * numel
        optimizer.engine.close()


def check_faults(library: Path) -> None:
    """What a GPU refuses, this device does, too."""
    device = join(library)
    there, here = torch.ones(3, 4, device=device), torch.ones(3, 4)
    for operator in (torch.add, torch.maximum, lambda a, b: torch.cat([a, b])):
        with pytest.raises(RuntimeError, match="on the same device"):
            operator(there, here)
    assert (there + torch.tensor(2.0)).sum().item() == 36.0
    assert there[torch.tensor([0, 2])].shape == (2, 4)
    (ctypes.c_uint8 * 4).from_address(torch.ops.hetero_test.real(there.data_ptr()))[0] = 7
    if os.fork() == 0:
        ctypes.string_at(there.data_ptr(), 1)
        os._exit(0)
    assert os.WTERMSIG(os.wait()[1]) == signal.SIGSEGV


def check_recorder(case: Case) -> None:
    """Times of a step's parts are taken when the device has done its work, if that is asked for."""
    waited = []
    with device_of_hetero(case.library, case.runtime):
        model, optimizer = case.build()
        for waits in (False, True):
            recorder = Recorder(optimizer.engine, facts_of(optimizer.engine, "net"), waits)
            with patch.object(torch_device, "synchronize") as synchronize:
                case.steps(model, optimizer, range(1))
            waited.append(synchronize.call_count)
            recorder.close()
        optimizer.engine.close()
    assert waited[1] >= waited[0] + 5  # begin and end of forward and backward, end of step()


pytestmark = pytest.mark.skipif(
    torch_device.MISSING is not None, reason=torch_device.MISSING or "has a C++ compiler"
)

CPU = {"placement_policy": "cpu"}
NVME = {"placement_policy": "nvme", "host_memory": "1MiB"}
AUTO = {"placement_policy": "auto", "device_memory": "1200KiB", "host_memory": "1MiB"}
ALL_THERE = {"placement_policy": "cuda", "device_memory": "64MiB"}
ACTIVATIONS = {"activation_memory": "300KiB", "device_memory": "1MiB"}
AGAIN = {"activation_memory": "64MiB", "device_memory": "64MiB", "recompute": "all"}
UNSCALED = {"initial_loss_scale": None}
CAST = {"dtype": "fp32", "autocast": torch.bfloat16}


@pytest.fixture(scope="module")
def library() -> Path:
    return torch_device.build()


@pytest.mark.parametrize("runtime", torch_device.RUNTIMES)
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        pytest.param(CPU, {}, id="cpu"),
        pytest.param(CPU | AGAIN, {"accumulate": 2}, id="cpu-recompute"),
        pytest.param(CPU | AGAIN, CAST, id="cpu-recompute-autocast"),
        pytest.param(NVME | ACTIVATIONS, {}, id="nvme-activations"),
        pytest.param(
            NVME | ACTIVATIONS | {"recompute": "auto"}, {"tiled": True}, id="nvme-recompute-tiled"
        ),
        pytest.param(ACTIVATIONS | AUTO, CAST | {"tiled": True}, id="auto-autocast-tiled"),
        pytest.param(ALL_THERE, CAST, id="all-on-device-autocast"),
    ],
)
def test_the_bits_of_plain_torch(
    settings: dict[str, Any], more: dict[str, Any], runtime: str, library: Path, tmp_path: Path
) -> None:
    run_forked(check_same_bits, Case(library, tmp_path, settings, runtime=runtime, **more))


@pytest.mark.parametrize(
    "settings", [CPU, NVME | ACTIVATIONS, ALL_THERE], ids=["cpu", "nvme", "all"]
)
def test_what_is_loaded_goes_on(settings: dict[str, Any], library: Path, tmp_path: Path) -> None:
    run_forked(check_going_on, Case(library, tmp_path, settings))


def test_a_scaler_of_the_device(library: Path, tmp_path: Path) -> None:
    run_forked(check_scaler, Case(library, tmp_path, CPU | UNSCALED, "fp16"))


@pytest.mark.parametrize("settings", [CPU, ALL_THERE], ids=["cpu", "all"])
def test_uses_of_values(settings: dict[str, Any], library: Path, tmp_path: Path) -> None:
    run_forked(check_uses, Case(library, tmp_path, settings))


def test_what_a_gpu_refuses(library: Path) -> None:
    run_forked(check_faults, library)


def test_a_recorder_waits_for_the_device(library: Path, tmp_path: Path) -> None:
    run_forked(check_recorder, Case(library, tmp_path, CPU))
