"""hetero.compat with a GPU, which a fake device stands for: adapters compute there, same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hetero
from hetero.compat import deepspeed, fsdp
from hetero.compat.colossalai.nn.optimizer import HybridAdam
from hetero.compat.colossalai.zero import ShardedModelV2, ShardedOptimizerV2, ZeroInitContext
from offload.memory.tiers import Tier
from tests.support.training.small_net import Net, loss_of

pytestmark = pytest.mark.usefixtures("nothing_left")
Trained = tuple[Net, hetero.HybridOptimizer]


@pytest.fixture
def _device(fake_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.compat.colossalai.zero.cuda_available", lambda: True)


def with_deepspeed(**zero: Any) -> Trained:
    with deepspeed.zero.Init():
        model = Net()
    config = {
        "zero_optimization": {"stage": 3, **zero},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    for seed in range(2):
        engine.backward(loss_of(engine, seed))
        engine.step()
    assert optimizer is not None
    return model, optimizer


def with_colossalai(policy: str) -> Trained:
    with ZeroInitContext(torch.device("cuda"), convert_fp16=False, shard_param=True):
        model = Net()
    sharded = ShardedModelV2(model, None, tensor_placement_policy=policy)
    optimizer = ShardedOptimizerV2(sharded, HybridAdam(model.parameters(), lr=1e-2))
    for seed in range(2):
        optimizer.zero_grad()
        optimizer.backward(loss_of(sharded, seed))
        optimizer.step()
    return model, optimizer.optim


def with_fsdp(**keywords: Any) -> Trained:
    model = fsdp.fully_shard(Net(), **keywords)
    optimizer = fsdp.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for seed in range(2):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
    return model, optimizer


def masters_of(trained: Trained) -> list[torch.Tensor]:
    model, optimizer = trained
    found = hetero.masters(model.parameters())
    optimizer.engine.close()
    return found


@pytest.mark.parametrize(
    ("train", "tier"),
    [
        (lambda: with_deepspeed(), Tier.DEVICE),
        (lambda: with_deepspeed(offload_optimizer={"device": "cpu"}), Tier.HOST),
        (lambda: with_colossalai("cuda"), Tier.DEVICE),
        (lambda: with_colossalai("auto"), Tier.DEVICE),
        (lambda: with_colossalai("cpu"), Tier.HOST),
        (lambda: with_fsdp(), Tier.DEVICE),
        (lambda: with_fsdp(offload_policy=fsdp.CPUOffloadPolicy()), Tier.HOST),
    ],
)
def test_where_state_lives(
    train: Callable[[], Trained], tier: Tier, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    expected = masters_of(train())
    request.getfixturevalue("_device")
    torch.manual_seed(0)
    model, optimizer = train()
    assert optimizer.engine.backend.kind == "cuda"
    assert set(optimizer.engine.placement.param) == {tier}
    assert all(map(torch.equal, masters_of((model, optimizer)), expected))


@pytest.mark.usefixtures("_device")
def test_states_leave_the_device_and_come_back() -> None:
    """engine.offload_states() of DeepSpeed's adapter, between two steps."""
    found = []
    for leaves in (False, True):
        torch.manual_seed(0)
        config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        engine, _, _, _ = deepspeed.initialize(model=Net(), config=config)
        ledger = engine.optimizer.engine.ledger
        for seed in range(2):
            engine.backward(loss_of(engine, seed))
            engine.step()
            if leaves:
                before = ledger.budget_bytes["device"]
                engine.offload_states()
                assert ledger.budget_bytes["device"] < before
                engine.reload_states()
                assert ledger.budget_bytes["device"] == before
        found.append(hetero.masters(engine.module.parameters()))
        engine.destroy()
    assert all(map(torch.equal, *found))
