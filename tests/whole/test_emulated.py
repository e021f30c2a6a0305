"""A device with memory of its own, emulated: the same bits, the bytes that theory says, no hang."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.planning.placement import link_buffers
from hetero.stand_ins.parameter_classes import AbsentParameter
from offload.errors import BudgetError
from offload.memory.operation import Operation
from offload.memory.tiers import Account, Tier
from tests.support.ranks import rank_training
from tests.support.ranks.processes import RankPool
from tests.support.training.emulated import (
    LARGE,
    PLACES,
    SMALL,
    assert_same_bits,
    device_cache,
    emulated,
    reference,
    trained,
)
from tests.support.training.loops import batches, build, tiny_gpt2
from tests.support.training.smallest import smallest_host_memory

pytestmark = pytest.mark.usefixtures("nothing_left")

SETTINGS: dict[str, dict[str, Any]] = PLACES | {
    "cpu-all-gathered": {"placement_policy": "cpu", "device_memory": LARGE},
    "nvme-grads-on-disk": {"placement_policy": "nvme", "host_memory": "1400KiB"},
    "nvme-all-on-disk-threads": PLACES["nvme-all-on-disk"] | {"debug": {"io_engine": "threads"}},
    "auto-three-tiers": {"placement_policy": "auto", "device_memory": "1200KiB"},
    "auto-large-chunks": {
        "placement_policy": "auto",
        "device_memory": "700KiB",
        "chunk_numel": 4096 * 8,
    },
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "dtype",
    ["bf16", *(pytest.param(other, marks=pytest.mark.extra) for other in ("fp32", "fp16"))],
)
@pytest.mark.parametrize("settings", SETTINGS)
def test_same_bits_as_cpu(settings: str, dtype: str, accumulate: int, tmp_path: Path) -> None:
    engine = assert_same_bits(tmp_path, SETTINGS[settings], dtype, accumulate)
    assert engine.backend.device.type == "cpu"


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("policy", ["cpu", "auto"])
def test_bytes_over_the_link_are_those_of_misses_and_gradients(
    tmp_path: Path, policy: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = emulated(tmp_path, {"placement_policy": policy}, dtype="bf16")
    options["device_memory"] = SMALL if policy == "cpu" else "1200KiB"
    model, optimizer = build(**options)
    engine = optimizer.engine
    away = [c for c in engine.layout.chunks if engine.placement.param[c.id] is not Tier.DEVICE]
    assert (len(away) < len(engine.layout.chunks)) == (policy == "auto")
    numel = sum(s.param.numel for c in away for s in c.slices)
    missed: list[int] = []
    backing = device_cache(engine)._backing
    read = backing.read

    def counted(chunk: int, slot: int) -> Operation:
        missed.append(chunk)
        return read(chunk, slot)

    monkeypatch.setattr(backing, "read", counted)
    for step in range(3):
        before = engine.traffic
        missed.clear()
        for tokens in batches(accumulate, seed=step):
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        device_cache(engine).finish_transfers()
        after = engine.traffic
        assert after.d2h - before.d2h == accumulate * numel * 2
        misses = sum(engine.layout.chunks[chunk].used_numel * 2 for chunk in missed)
        assert after.h2d - before.h2d == misses
        # Each chunk at least once a step; without prefetch at most twice a micro-batch.
        assert {c.id for c in away} <= set(missed)
    engine.close()


def test_what_fits_on_the_device_is_fetched_once_a_step(tmp_path: Path) -> None:
    options = emulated(tmp_path, {"placement_policy": "cpu", "device_memory": LARGE})
    model, optimizer = build(**options, dtype="bf16", debug={"prefetch": False})
    engine = optimizer.engine
    tokens = batches(1)[0]
    used = sum(c.used_numel for c in engine.layout.chunks) * 2
    for step in range(1, 4):
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        assert engine.traffic.h2d == step * used
    engine.close()


def test_without_prefetch_small_slots_fetch_twice(tmp_path: Path) -> None:
    """Forward and backward each bring every chunk but those that the turn between them keeps."""
    model, optimizer = build(
        **emulated(tmp_path, {"placement_policy": "cpu", "device_memory": "200KiB"}),
        dtype="bf16",
        debug={"prefetch": False},
    )
    engine = optimizer.engine
    tokens = batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    used = sum(c.used_numel for c in engine.layout.chunks) * 2
    slots = engine.placement.gathered_slots * engine.layout.slot_numel * 2
    assert 2 * used - slots <= engine.traffic.h2d <= 2 * used
    engine.close()


def test_gradients_under_way_are_charged_to_the_device(tmp_path: Path) -> None:
    model, optimizer = build(
        **emulated(tmp_path, {"placement_policy": "cpu", "debug": {"link_gbps": 0.01}}),
        dtype="bf16",
    )
    engine = optimizer.engine
    seen: list[int] = []
    charge = engine.ledger.charge

    def watch(tier: Tier, account: Account, nbytes: int) -> None:
        charge(tier, account, nbytes)
        if account is Account.GRAD_SLOT:
            seen.append(engine.ledger.used(Tier.DEVICE, Account.GRAD_SLOT))

    engine.ledger.charge = watch  # type: ignore[method-assign]
    tokens = batches(1)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert seen
    assert 0 < max(seen) <= engine.placement.grad_offload_bytes
    assert engine.ledger.used(Tier.DEVICE, Account.GRAD_SLOT) == 0
    engine.close()


@pytest.mark.parametrize("policy", ["nvme", "auto"])
def test_buffers_of_the_link_are_within_the_smallest_budget(tmp_path: Path, policy: str) -> None:
    options = emulated(tmp_path, {"placement_policy": policy}, dtype="bf16")
    least = smallest_host_memory(lambda: build(**options, host_memory=100 << 10))
    model, optimizer = build(**options, host_memory=least)
    engine = optimizer.engine
    held = engine.ledger.used(Tier.HOST, Account.LINK)
    assert held == prod(link_buffers(engine.layout, engine.chunk_groups[0].dtypes)) > 0
    assert trained(model, optimizer).same_bits(reference("bf16"))
    assert engine.ledger.peak_bytes["host"] <= least


def test_adding_to_a_clipped_gradient_waits_for_the_slot_of_another(tmp_path: Path) -> None:
    """There is one slot for gradients, which the one before holds while it is on its way."""

    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])

    found = []
    for options in (
        {"placement_policy": "cpu"},
        emulated(
            tmp_path,
            {
                "placement_policy": "nvme",
                "device_memory": "250KiB",
                "host_memory": "200KiB",
                "debug": {"link_gbps": 0.001},
            },
        ),
    ):
        model, optimizer = build(make, **options, dtype="fp32")
        for clip in (0.1, 0.05, 0.02):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
            model(x).square().mean().backward()
            hetero.clip_grad_norm_(model.parameters(), clip)
        found.append(hetero.grads(model.parameters()))
        optimizer.engine.close()
    assert all(map(torch.equal, *found))


def test_an_assigned_gradient_may_be_changed_once_it_was_taken_in(tmp_path: Path) -> None:
    """Its owner may use the tensor for something else while it is on its way to RAM."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 512), nn.Linear(512, 16))

    found = []
    for options in (
        {"placement_policy": "cpu"},
        emulated(
            tmp_path,
            {"placement_policy": "cpu", "device_memory": "800KiB", "debug": {"link_gbps": 0.0002}},
            chunk_numel=40_960,
        ),
    ):
        model, optimizer = build(make, **options, dtype="bf16")
        loss = model(torch.ones(4, 16)).float().sum()
        assigned = [torch.full_like(p, 3.0) for p in model.parameters()]
        for p, grad in zip(model.parameters(), assigned, strict=True):
            p.grad = grad
        optimizer.backward(loss)
        for grad in assigned:
            grad.fill_(1e9)
        found.append(hetero.grads(model.parameters()))
        optimizer.engine.close()
    assert all(map(torch.equal, *found))


class Blocks(nn.Module):
    """Checkpointed blocks between batch norms, whose weights stay fp32: two chunk groups."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()) for _ in range(4)]
        )
        self.frozen = nn.Linear(64, 64)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number % 2 == 0)  # type: ignore[assignment]
        return self.frozen(x)


def train_blocks(**options: Any) -> list[torch.Tensor]:
    """Everything that a loop does to parameters and gradients; all values at its end."""
    torch.manual_seed(0)
    with hetero.ZeroInitContext(chunk_numel=4096, **options):
        model = Blocks()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = hetero.HybridAdam(trained, lr=1e-2)
    hetero.initialize(model, optimizer)
    found: list[torch.Tensor] = []
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = model(x.requires_grad_()).float().square().mean()
        optimizer.backward(loss)
        torch.nn.utils.clip_grad_value_(trained, 0.01)
        found += hetero.grads(trained)
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            for p in model.parameters():
                with hetero.gathered(p, modifier_rank=0), torch.no_grad():
                    p.mul_(0.9)
        if step == 2:
            # (Where parameters are resident, state_dict() gives the parameters themselves.)
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            states = optimizer.state_dict()
            model.load_state_dict({k: v * 0.5 for k, v in weights.items()})
            optimizer.load_state_dict(states)
            found += weights.values()
        found.append(loss.detach())
    found += model.state_dict().values()
    found += hetero.masters(trained)
    optimizer.engine.close()
    return [value.clone() for value in found]


@pytest.mark.parametrize(
    "settings",
    [
        {"placement_policy": "cpu", "device_memory": "200KiB"},
        {"placement_policy": "nvme", "device_memory": "200KiB", "host_memory": "400KiB"},
        {"placement_policy": "auto", "device_memory": "300KiB", "host_memory": "400KiB"},
        {"placement_policy": "cuda", "device_memory": LARGE},
    ],
    ids=["cpu", "nvme", "auto", "cuda"],
)
def test_all_that_a_loop_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    found = train_blocks(backend="emulated", nvme_path=str(tmp_path), **settings)
    expected = train_blocks(placement_policy="cpu")
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_parameters_are_absent_unless_on_the_device(tmp_path: Path) -> None:
    _model, optimizer = build(
        **emulated(tmp_path, {"placement_policy": "auto", "device_memory": "1200KiB"}), dtype="bf16"
    )
    engine = optimizer.engine
    for m in engine.params.in_order():
        on_device = engine.placement.param[m.chunk.id] is Tier.DEVICE
        assert engine.params.is_resident(m.chunk) == on_device
        assert isinstance(m.param, AbsentParameter) == (not on_device)
        assert not m.param.isnan().any()
        state_kinds = (engine.placement.grad, engine.placement.optim_state)
        assert all((tiers[m.chunk.id] is Tier.DEVICE) == on_device for tiers in state_kinds)
    engine.close()


def test_a_device_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="device_memory") as caught:
        build(**emulated(tmp_path, {"placement_policy": "auto", "device_memory": "20KiB"}))
    assert "20.0 KiB" in str(caught.value)


def test_unfreezing_takes_from_the_device_too(tmp_path: Path) -> None:
    results = []
    for options in (
        {"placement_policy": "cpu", "chunk_numel": 4096},
        emulated(tmp_path, {"placement_policy": "cpu", "device_memory": "1MiB"}),
    ):
        torch.manual_seed(0)
        model = tiny_gpt2()
        model.transformer.wte.requires_grad_(False)
        optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
        hetero.initialize(model, optimizer, **options)
        for step, tokens in enumerate(batches(4)):
            if step == 2:
                model.transformer.wte.requires_grad_(True)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ledger = optimizer.engine.ledger
        assert ledger.peak_bytes["device"] <= (ledger.budget_bytes["device"] or 0)
        results.append(hetero.masters(model.parameters()))
        optimizer.engine.close()
    assert all(map(torch.equal, *results))


# Ranks

RANK_PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"placement_policy": "cpu"},
    "nvme": {"placement_policy": "nvme", "host_memory": "1440KiB"},
}


@pytest.mark.parametrize(
    ("stage", "place", "dtype", "accumulate", "more"),
    [
        (3, "cpu", "bf16", 1, {}),
        pytest.param(3, "nvme", "fp32", 3, {}, marks=pytest.mark.extra),
        pytest.param(2, "nvme", "bf16", 1, {}, marks=pytest.mark.extra),
        (1, "cpu", "fp32", 3, {}),
        pytest.param(3, "cpu", "fp16", 3, {"debug": {"prefetch": False}}, marks=pytest.mark.extra),
        pytest.param(1, "nvme", "bf16", 1, {}, marks=pytest.mark.extra),
        pytest.param(3, "cpu", "bf16", 3, {"debug": {"link_gbps": 0.02}}, marks=pytest.mark.extra),
    ],
)
def test_two_ranks(
    ranks2: RankPool,
    tmp_path: Path,
    stage: int,
    place: str,
    dtype: str,
    accumulate: int,
    more: dict[str, Any],
) -> None:
    common = {"zero_stage": stage, "dtype": dtype, "initial_loss_scale": 256.0}
    expected = ranks2.run(rank_training.train, common, 2, accumulate)
    options = emulated(tmp_path, {**RANK_PLACES[place], **more}, **common)
    options |= {"device_memory": "600KiB", "chunk_numel": 16384}
    found = ranks2.run(rank_training.train, options, 2, accumulate)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["norms"] == theirs["norms"]
        assert all(map(torch.equal, mine["masters"], theirs["masters"]))


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "emulated"}, "backend='emulated' needs device_memory"),
        (
            {"backend": "emulatd"},
            "backend must be one of cpu, cuda, emulated, auto.*did you mean 'emulated'",
        ),
        ({"debug": {"link_gbps": 8}}, "link_gbps is of no use with backend='cpu'"),
        (
            {"backend": "emulated", "device_memory": "1MiB", "debug": {"link_gbps": 0}},
            "link_gbps must be a number of GB/s",
        ),
        (
            {"backend": "emulated", "device_memory": "1MiB", "debug": {"link_gbps": "fast"}},
            "link_gbps must be a number of GB/s",
        ),
        ({"placement_policy": "cuda"}, "needs a CUDA device"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hetero.Config.make(**options)


def test_defaults() -> None:
    config = hetero.Config(backend="emulated", device_memory="1MiB")
    assert config.debugging.link_gbps == 16.0
    assert config.device_bytes == 1 << 20
    assert hetero.Config(device_memory="1MiB").device_bytes is None
