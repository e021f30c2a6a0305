"""Training on CUDA: one result for every placement, torch's result, budgets, no waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetero
from hetero.config import Config
from offload.device.cuda_backend import CudaBackend
from offload.device.device_arena import NOT_PAGE_LOCKED
from offload.errors import BudgetError
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, StateKind, Tier
from tests.support.cuda.delays import delayed_streams
from tests.support.training.loops import Run

VOCABULARY, WIDTH, LENGTH = 512, 128, 64
LR = 1e-3


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # Without a bias: the keys' has a gradient of rounding errors alone, which Adam makes large.
        self.mixed = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mixed(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        x = x + torch.softmax(scores, dim=-1) @ v
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A language model with a buffer, a parameter of one element, and tied weights."""

    def __init__(self, width: int = WIDTH, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.randn(LENGTH, width) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        x = x + self.positions.to(x.dtype)  # type: ignore[operator]
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(count: int) -> list[torch.Tensor]:
    """Of tokens, on the device."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randint(0, VOCABULARY, (count, 4, LENGTH), generator=generator)
    return list(made.cuda())


def managed(path: Path, width: int = WIDTH, **options: Any) -> tuple[Net, hetero.HybridAdam]:
    """The net under seed 0, on CUDA."""
    torch.manual_seed(0)
    given = {"backend": "cuda", "nvme_path": str(path), "chunk_numel": 64 * 1024, **options}
    with hetero.ZeroInitContext(**given):
        model = Net(width)
    optimizer = hetero.HybridAdam(model.parameters(), lr=LR, weight_decay=0.1)
    return hetero.initialize(model, optimizer)


def train(
    model: Net,
    optimizer: hetero.HybridAdam,
    data: list[torch.Tensor],
    accumulate: int = 1,
    clip: float | None = 1.0,
) -> Run:
    """As tests.training.train(): numbers are read after the last step, and the engine is closed."""
    run = Run()
    losses = []
    for first in range(0, len(data), accumulate):
        for tokens in data[first : first + accumulate]:
            loss = model(tokens)
            optimizer.backward(loss / accumulate)
            losses.append(loss.detach())
        if clip is not None:
            run.norms.append(hetero.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    run.losses = [float(loss) for loss in losses]
    run.masters = hetero.masters(model.parameters())
    for param in model.parameters():
        with hetero.gathered(param):
            run.params.append(param.detach().cpu().clone())
    optimizer.engine.close()
    return run


def plain(data: list[torch.Tensor], width: int = WIDTH) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of torch's own training in fp32 on the device, clipped to norm 1."""
    torch.manual_seed(0)
    model = Net(width).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    losses = []
    for tokens in data:
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


TIGHT = {"fp32": "3MiB", "bf16": "1536KiB", "fp16": "1536KiB"}
SETTINGS = [
    pytest.param({"placement_policy": "cpu"}, id="cpu"),
    pytest.param({"placement_policy": "cpu", "debug": {"prefetch": False}}, id="cpu-no-prefetch"),
    pytest.param({"placement_policy": "cpu", "device_memory": "1GiB"}, id="cpu-all-gathered"),
    pytest.param({"placement_policy": "nvme"}, id="nvme"),
    pytest.param({"placement_policy": "nvme", "host_memory": "8MiB"}, id="nvme-little-ram"),
    pytest.param({"placement_policy": "auto", "device_memory": "6MiB"}, id="auto"),
    pytest.param({"placement_policy": "cuda", "device_memory": "1GiB"}, id="cuda"),
]
REFERENCES: dict[Any, Run] = {}


def run(path: Path, settings: dict[str, Any], dtype: str, accumulate: int = 1) -> Run:
    given = {"device_memory": TIGHT[dtype], "dtype": dtype, "initial_loss_scale": 256.0, **settings}
    model, optimizer = managed(path, **given)
    engine = optimizer.engine
    found = train(model, optimizer, batches(6), accumulate)
    assert engine.ledger.peak_bytes["device"] <= (engine.ledger.budget_bytes["device"] or 0)
    assert not [note for note in engine.notes if NOT_PAGE_LOCKED in note]
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.usefixtures("deterministic")
def test_every_placement_has_the_same_bits(
    settings: dict[str, Any], dtype: str, accumulate: int, tmp_path: Path
) -> None:
    key = dtype, accumulate
    if key not in REFERENCES:
        everything = {"placement_policy": "cuda", "device_memory": "1GiB"}
        REFERENCES[key] = run(tmp_path, everything, dtype, accumulate)
    assert run(tmp_path, settings, dtype, accumulate).same_bits(REFERENCES[key])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.usefixtures("deterministic")
def test_torchs_result(settings: dict[str, Any], tmp_path: Path) -> None:
    losses, weights = plain(batches(6))
    found = run(tmp_path, settings, "fp32")
    torch.testing.assert_close(found.losses, losses, rtol=1e-4, atol=1e-4)
    for one, other in zip(found.masters, weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("inputs", ["device", "ram", "page-locked"])
def test_a_step_does_not_wait_for_the_device(
    settings: dict[str, Any], inputs: str, tmp_path: Path
) -> None:
    given = {"device_memory": TIGHT["bf16"], **settings}
    model, optimizer = managed(tmp_path, **given)
    data = batches(4)
    if inputs != "device":
        data = [tokens.cpu() for tokens in data]
    if inputs == "page-locked":
        data = [tokens.pin_memory() for tokens in data]
    for number, tokens in enumerate(data):
        if number < 2:  # kernels are loaded, and orders learnt
            optimizer.backward(model(tokens))
            optimizer.step()
            optimizer.zero_grad()
            continue
        with no_waiting():
            optimizer.backward(model(tokens))
            optimizer.step()
            optimizer.zero_grad()
    optimizer.engine.close()


@pytest.mark.usefixtures("deterministic")
def test_slots_under_stress(tmp_path: Path) -> None:
    """Wide layers through few slots, with compute in a stream of its own that is held up, and
    streams that sleep for random times.
    """
    found = []
    for memory, delays in (("64MiB", True), ("64MiB", False), ("2GiB", False)):
        model, optimizer = managed(
            tmp_path, width=1024, placement_policy="cpu", device_memory=memory, chunk_numel=None
        )
        runtime = optimizer.engine.backend.runtime
        with torch.cuda.stream(torch.cuda.Stream()), ExitStack() as stress:
            if delays:
                stress.enter_context(delayed_streams(runtime, seed=0))
            torch.cuda._sleep(20_000_000)
            found.append(train(model, optimizer, batches(8), clip=None))
    assert all(run.same_bits(found[-1]) for run in found)


def test_the_device_holds_no_more_than_its_budget_and_what_compute_takes(tmp_path: Path) -> None:
    data = batches(3)
    torch.manual_seed(0)
    plain = Net(512).to(torch.bfloat16).cuda()
    params_bytes = sum(p.nbytes for p in plain.parameters())
    plain(data[0]).backward()
    plain.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plain(data[0]).backward()
    beside = torch.cuda.max_memory_allocated() - before  # activations, and all gradients
    del plain
    assert params_bytes > (16 << 20)
    model, optimizer = managed(
        tmp_path, width=512, placement_policy="cpu", device_memory="8MiB", chunk_numel=None
    )
    torch.cuda.synchronize()
    outside = torch.cuda.memory_allocated() - optimizer.engine.ledger.in_use_bytes["device"]
    torch.cuda.reset_peak_memory_stats()
    for tokens in data:
        optimizer.backward(model(tokens))
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - outside <= (8 << 20) + beside
    assert optimizer.engine.backend.beside_bytes() > 0
    optimizer.engine.close()


def test_ram_is_pinned_exactly(tmp_path: Path) -> None:
    model, optimizer = managed(tmp_path, placement_policy="cpu", device_memory="4MiB")
    chunk_group = optimizer.engine.chunk_groups[0]
    chunk = chunk_group.layout.chunks[0]
    assert chunk_group.params._homes.flat(chunk).is_pinned()
    assert chunk_group.grads.homes.flat(chunk).is_pinned()
    assert not chunk_group.memory.homes[StateKind.OPTIM_STATE].flat(chunk).is_pinned()
    assert all(p.device.type == "cuda" for p in model.parameters())
    assert model.positions.device.type == "cuda"
    optimizer.engine.close()


def test_a_device_without_room_is_refused_with_numbers() -> None:
    backend = CudaBackend()
    ledger = Ledger({})
    free, _ = backend.runtime.memory()
    with pytest.raises(BudgetError, match=r"the device has no room for .* are free, and torch has"):
        backend.arena(1, free + (8 << 30), ledger, Account.PARAM)
    assert ledger.used(Tier.DEVICE, Account.PARAM) == 0
    backend.close()


def test_state_goes_out_and_comes_back(tmp_path: Path) -> None:
    model, optimizer = managed(
        tmp_path, placement_policy="auto", device_memory="6MiB", dtype="bf16"
    )
    for tokens in batches(2):
        optimizer.backward(model(tokens))
        optimizer.step()
        optimizer.zero_grad()
    masters, state = hetero.masters(model.parameters()), optimizer.state_dict()
    assert all(m.device.type == "cpu" for m in masters)
    optimizer.engine.close()
    other, second = managed(tmp_path, placement_policy="cuda", device_memory="1GiB", dtype="bf16")
    second.load_state_dict(state)
    assert all(map(torch.equal, masters, hetero.masters(other.parameters())))
    with hetero.gathered(other.scale, modifier_rank=0):
        other.scale.data.fill_(3.0)
    assert hetero.masters(other.scale)[0].item() == 3.0
    second.engine.close()


def test_inputs_come_to_the_device(tmp_path: Path) -> None:
    model, optimizer = managed(tmp_path, placement_policy="cpu", device_memory="4MiB")
    tokens = batches(1)[0].cpu()
    assert model(tokens).device.type == "cuda"
    assert model(tokens.pin_memory()).device.type == "cuda"
    optimizer.engine.close()


def test_auto_is_cuda() -> None:
    config = Config(backend="auto")
    assert config.backend == "cuda"
    assert config.device_bytes is not None
    assert config.device_bytes > 0
