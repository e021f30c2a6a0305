"""activation_memory: the same bits in every placement, on every device, and over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.activations.store import ActivationStore
from offload.errors import BudgetError
from offload.memory.tiers import Account, Tier
from tests.support.activations import steps_of_rank
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import Run, batches, build, train

pytestmark = pytest.mark.usefixtures("nothing_left", "fake_cuda")

# Without checkpoints a forward saves about 1.2 MiB in fp32; the logits are 77 KiB of it.
HOSTS = {None: "300KiB", False: "240KiB", True: "240KiB"}
SETTINGS = [
    pytest.param({"placement_policy": "cpu"}, id="cpu"),
    pytest.param({"placement_policy": "nvme", "host_memory": "2MiB"}, id="nvme"),
    pytest.param(
        {"placement_policy": "nvme", "host_memory": "2MiB", "durable": True}, id="durable"
    ),
    pytest.param(
        {"placement_policy": "nvme", "backend": "emulated", "device_memory": "3MiB"}, id="emulated"
    ),
    pytest.param(
        {"placement_policy": "cpu", "backend": "cuda", "device_memory": "3MiB"}, id="cuda"
    ),
]
CHECKPOINTS = [pytest.param(kind, id=f"reentrant-{kind}") for kind in (None, False, True)]
REFERENCES: dict[Any, Run] = {}


def made(path: Path, settings: dict[str, Any], reentrant: bool | None = None, **more: Any) -> Any:
    """A GPT-2 and its optimizer, with so little for activations that some leave."""
    given = {"activation_memory": HOSTS[reentrant], "nvme_path": str(path), "chunk_numel": 4096}
    model, optimizer = build(**{**given, **settings, **more})
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
    return model, optimizer


def reference(accumulate: int = 1) -> Run:
    """The same training with what autograd saves in memory."""
    if accumulate not in REFERENCES:
        model, optimizer = build(placement_policy="cpu", chunk_numel=4096)
        REFERENCES[accumulate] = train(model, optimizer, batches(4), accumulate, clip=1.0)
    return REFERENCES[accumulate]


def store_of(engine: hetero.Engine) -> ActivationStore:
    assert engine.watch.activations is not None
    return engine.watch.activations


@pytest.mark.covering(1)
@pytest.mark.parametrize("reentrant", CHECKPOINTS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_the_same_bits(settings: dict[str, Any], reentrant: bool | None, tmp_path: Path) -> None:
    """With two micro-batches."""
    model, optimizer = made(tmp_path, settings, reentrant)
    engine = optimizer.engine
    run = train(model, optimizer, batches(4), 2, clip=1.0)
    assert run.same_bits(reference(2))
    moved = engine.traffic
    if reentrant is None:
        assert moved.activations_written > 0
        assert moved.activations_read > 0
    if engine.backend.separate and reentrant is not False:  # its few inputs find room
        assert moved.h2d >= moved.activations_h2d > 0
        assert moved.d2h >= moved.activations_d2h > 0
    assert set(engine.ledger.in_use_bytes.values()) == {0}
    for tier in ("host", "device"):
        assert engine.ledger.peak_bytes[tier] <= (engine.ledger.budget_bytes[tier] or 1 << 62)
    assert engine.notes == [note for note in engine.notes if "no budget" not in note]


@pytest.mark.parametrize(
    "overlap",
    [
        "none",
        "both",
        *(pytest.param(way, marks=pytest.mark.extra) for way in ("forward", "backward")),
    ],
)
def test_beside_updates(overlap: str, tmp_path: Path) -> None:
    """Optimizer state shares the disk with activations."""
    settings = {
        "placement_policy": "nvme",
        "host_memory": "2MiB",
        "debug": {"overlap_updates": overlap},
    }
    model, optimizer = made(tmp_path, settings)
    engine = optimizer.engine
    run = train(model, optimizer, batches(4), clip=1.0)
    assert run.same_bits(reference())
    moved = engine.traffic
    assert moved.disk_read > moved.activations_read > 0
    assert moved.disk_write > moved.activations_written > 0


def test_auto_and_off(tmp_path: Path) -> None:
    for memory, has_store in (("auto", True), (None, False)):
        settings = {"placement_policy": "nvme", "host_memory": "2MiB", "activation_memory": memory}
        model, optimizer = made(tmp_path, settings)
        engine = optimizer.engine
        assert (engine.watch.activations is not None) == has_store
        if engine.watch.activations is not None:
            assert engine.watch.activations.limits.host_bytes == 512 << 10
            assert not engine.watch.activations.limits.is_strict
        planned = sum(group.placement.host_bytes for group in engine.chunk_groups)
        assert planned <= (2 << 20) - (512 << 10 if has_store else 0)
        assert train(model, optimizer, batches(4), clip=1.0).same_bits(reference())


def test_placement_leaves_the_share_out(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="activation_memory is 1.9 MiB of RAM"):
        made(
            tmp_path,
            {"placement_policy": "nvme", "host_memory": "2MiB"},
            activation_memory=(2 << 20) - (64 << 10),
        )


def test_the_block_has_the_loss_too(tmp_path: Path) -> None:
    losses = []
    for in_block in (False, True):
        model, optimizer = made(tmp_path, {"placement_policy": "cpu"}, activation_memory="600KiB")
        store, x = store_of(optimizer.engine), batches(1)[0]

        def loss_of(x: torch.Tensor = x, model: torch.nn.Module = model) -> torch.Tensor:
            logits = model(input_ids=x).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())

        if in_block:
            before = len(store)
            with hetero.offload_activations(model), hetero.offload_activations(model):
                loss = loss_of()
            assert len(store) > before
            saved = len(store)
        else:
            loss = loss_of()
            saved = len(store)
        optimizer.backward(loss)
        losses.append((loss.item(), saved))
        assert len(store) == 0
        optimizer.step()
        optimizer.engine.close()
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] < losses[1][1]


def test_the_block_needs_the_option(tmp_path: Path) -> None:
    model, optimizer = build(placement_policy="cpu")
    with pytest.raises(ValueError, match="activation_memory"), hetero.offload_activations(model):
        pass
    optimizer.engine.close()


def test_the_share_is_free_between_steps(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path, {"placement_policy": "nvme", "host_memory": "2MiB"})
    engine, ledger = optimizer.engine, optimizer.engine.ledger
    for tokens in batches(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        assert 0 < ledger.used(Tier.HOST, Account.ACTIVATION) <= 300 << 10
        optimizer.backward(loss)
        del loss
        engine.watch.activations.movement.settle()
        assert store_of(engine).kept_bytes == len(store_of(engine)) == 0
        optimizer.step()
        optimizer.zero_grad()
    engine.set_budget(host_memory="3MiB")
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.backward(loss)
    optimizer.step()
    optimizer.engine.close()


def test_evaluation_saves_nothing(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path, {"placement_policy": "cpu"})
    with torch.no_grad():
        model(input_ids=batches(1)[0])
    assert len(store_of(optimizer.engine)) == 0
    optimizer.engine.close()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.extra), 3])
def test_two_ranks(ranks2: RankPool, stage: int, tmp_path: Path) -> None:
    """Each rank's activations are its own, and so is its share."""
    options = {"zero_stage": stage, "placement_policy": "nvme", "nvme_path": str(tmp_path)}
    options |= {"host_memory": "6MiB"}
    off, on = (
        ranks2.run(steps_of_rank, options | {"activation_memory": memory}, 24)
        for memory in (None, "200KiB")
    )
    for (expected, _), (found, written) in zip(off, on, strict=True):
        assert all(map(torch.equal, found, expected))
        assert written > 0
