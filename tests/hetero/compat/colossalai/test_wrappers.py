"""hetero/compat/colossalai: wrappers of models and optimizers, plugin and booster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.compat.colossalai.booster import Booster
from hetero.compat.colossalai.booster.plugin import GeminiPlugin
from hetero.compat.colossalai.logging import disable_existing_loggers, get_dist_logger
from hetero.compat.colossalai.nn.optimizer import CPUAdam, HybridAdam
from hetero.compat.colossalai.zero import (
    BucketTensorShardStrategy,
    GeminiDDP,
    GeminiOptimizer,
    ShardedModelV2,
    ShardedOptimizerV2,
    TensorShardStrategy,
    ZeroInitContext,
)
from tests.support.training.small_net import Net, assert_same, loss_of, plain, trained

CPU = torch.device("cpu")


def built(**arguments: Any) -> Net:
    torch.manual_seed(0)
    with ZeroInitContext(CPU, convert_fp16=False, **arguments):
        return Net()


STEPS = [[0], [1]]


def train(model: nn.Module, optimizer: Any) -> None:
    for (seed,) in STEPS:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, seed))
        optimizer.step()


@pytest.mark.covering(1)
@pytest.mark.parametrize("strategy", [TensorShardStrategy, BucketTensorShardStrategy])
@pytest.mark.parametrize("policy", ["cuda", "cpu", "auto"])
def test_sharded_models(strategy: Any, policy: str, nothing_left: None) -> None:
    model = built(shard_strategy=strategy(), shard_param=True)
    sharded = ShardedModelV2(model, strategy(), tensor_placement_policy=policy)
    optimizer = ShardedOptimizerV2(
        sharded, CPUAdam(sharded.parameters(), lr=1e-2), initial_scale=2**5
    )
    train(sharded, optimizer)
    assert_same(model, trained(STEPS))
    config = optimizer.engine.config
    assert config.placement_policy == ("auto" if policy == "cuda" else policy)
    assert (config.debugging.shard_strategy, config.zero_stage) == (strategy.name, 3)
    assert list(sharded.state_dict()) == list(model.state_dict())
    assert optimizer.loss_scale == 1.0


def test_parameters_may_be_whole_on_each_rank() -> None:
    model = built()
    sharded = ShardedModelV2(model, TensorShardStrategy(), fp32_reduce_scatter=True)
    optimizer = ShardedOptimizerV2(sharded, HybridAdam(model.parameters()))
    config = optimizer.engine.config
    assert (config.zero_stage, config.reduce_dtype) == (2, "fp32")


def test_states_on_nvme_by_the_optimizers_arguments(tmp_path: Path, nothing_left: None) -> None:
    for fraction, policy in ((1.0, "nvme"), (0.5, "auto")):
        model = built(shard_param=True)
        sharded = ShardedModelV2(model, None, tensor_placement_policy="cpu")
        adam = HybridAdam(
            model.parameters(),
            lr=1e-2,
            nvme_offload_fraction=fraction,
            nvme_offload_dir=str(tmp_path),
        )
        optimizer = ShardedOptimizerV2(sharded, adam)
        assert optimizer.engine.config.placement_policy == policy
        train(sharded, optimizer)
        assert_same(model, trained(STEPS))
        optimizer.engine.close()
    with pytest.raises(ValueError, match="needs nvme_offload_dir"):
        HybridAdam(nn.Linear(2, 2).parameters(), nvme_offload_fraction=0.5)
    with pytest.raises(ValueError, match="from 0 to 1, not 2"):
        CPUAdam(nn.Linear(2, 2).parameters(), nvme_offload_fraction=2)


def test_a_budget_that_is_smaller_than_the_model(tmp_path: Path, nothing_left: None) -> None:
    """hetero's own options are arguments of the context, and later ones do not lose them."""
    torch.manual_seed(0)
    with ZeroInitContext(
        CPU,
        shard_param=True,
        convert_fp16=False,
        host_memory="192KiB",
        nvme_path=str(tmp_path),
        chunk_numel=4096,
    ):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    sharded = ShardedModelV2(model, None, tensor_placement_policy="nvme")
    optimizer = ShardedOptimizerV2(sharded, HybridAdam(model.parameters()), initial_scale=2**5)
    assert optimizer.engine.config.host_memory == 192 << 10
    assert optimizer.engine.config.placement_policy == "nvme"


def test_clipping_scaling_and_overflows() -> None:
    torch.manual_seed(0)
    with ZeroInitContext(CPU, shard_param=True):
        model = Net()
    sharded = ShardedModelV2(model, None, tensor_placement_policy="cpu")
    optimizer = ShardedOptimizerV2(
        sharded,
        torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0),
        initial_scale=16,
        hysteresis=1,
        growth_interval=1,
        max_scale=32,
    )
    before = hetero.masters(model.parameters())
    optimizer.backward(loss_of(sharded) * 1e6)
    assert optimizer.clip_grad_norm(sharded, 1.0) == -1.0
    assert optimizer.step() is False
    assert optimizer.loss_scale == 8
    assert all(map(torch.equal, before, hetero.masters(model.parameters())))
    optimizer.zero_grad()
    optimizer.backward(loss_of(sharded))
    norm = optimizer.clip_grad_norm(sharded, 0.05)
    assert optimizer.step() is None
    assert optimizer.loss_scale == 16
    wanted = plain(torch.float16)[0]
    loss_of(wanted).backward()
    exact = torch.stack([p.grad.float().norm() for p in wanted.parameters() if p.grad is not None])
    assert norm == pytest.approx(float(exact.norm()), rel=1e-2)
    state = optimizer.state_dict()
    for _ in range(2):
        optimizer.grad_scale.update(False)
    assert optimizer.loss_scale == 32
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 16


def test_a_scheduler_of_the_wrapper() -> None:
    model = built(shard_param=True)
    sharded = ShardedModelV2(model, None, tensor_placement_policy="cpu")
    optimizer = ShardedOptimizerV2(sharded, HybridAdam(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for (seed,) in STEPS:
        optimizer.backward(loss_of(sharded, seed))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == 1e-2 / 4
    assert_same(model, trained(STEPS, rates=[1e-2, 5e-3]))


@pytest.mark.parametrize(
    ("arguments", "policy", "stage"),
    [
        ({}, "auto", 3),  # "cuda" where there is a GPU
        ({"offload_optim_frac": 1.0}, "cpu", 3),
        ({"offload_optim_frac": 1.0, "offload_param_frac": 1.0}, "cpu", 3),
        ({"offload_optim_frac": 0.5}, "auto", 3),
        ({"placement_policy": "cpu"}, "cpu", 3),
        ({"placement_policy": "auto", "shard_param_frac": 0.0}, "auto", 2),
        ({"strict_ddp_mode": True}, "auto", 1),
    ],
)
def test_gemini(arguments: dict[str, Any], policy: str, stage: int) -> None:
    model = built(shard_param=True)
    gemini = GeminiDDP(model, mixed_precision=torch.float32, **arguments)
    optimizer = GeminiOptimizer(
        HybridAdam(model.parameters(), lr=1e-2), gemini, max_norm=0.05, initial_scale=2**5
    )
    config = optimizer.engine.config
    assert (config.placement_policy, config.zero_stage, config.dtype) == (policy, stage, "fp32")
    train(gemini, optimizer)
    assert_same(model, trained(STEPS, max_norm=0.05))


def test_arguments_by_their_order() -> None:
    """GeminiDDP(model, chunk_config_dict, chunk_init_device, placement_policy, ...), as there."""
    model = built(shard_param=True)
    order = [{1: {"chunk_size": 5000}}, CPU, "static", True, 4, 0.0, 1.0, 0.0, 0.8, 0.9]
    order += [32, None, 32, True, True, False, True, torch.bfloat16, None, None, True, None]
    gemini = GeminiDDP(model, *order, verbose=False, enable_async_reduce=True)
    optimizer = GeminiOptimizer(
        HybridAdam(model.parameters()), gemini, 0.0, 2**5, 1, 2, 0.5, 1000, 2, 2**32, 0.25, 2.0
    )
    config = optimizer.engine.config
    assert (config.dtype, config.placement_policy, config.zero_stage) == ("bf16", "cpu", 2)
    assert optimizer.get_grad_norm() is None
    out = gemini(torch.zeros(1, 64))
    assert out.dtype == torch.float32
    optimizer.backward(out.square().sum() * 1e3)
    optimizer.step()
    assert optimizer.get_grad_norm() > 0.25
    assert isinstance(optimizer.unwrap(), HybridAdam)
    assert [name for name, _ in gemini.named_parameters()] == list(gemini.state_dict())
    with pytest.raises(TypeError, match="multiple values for argument 'chunk_config_dict'"):
        GeminiDDP(model, {}, chunk_config_dict={})
    with pytest.raises(TypeError, match="too many positional arguments"):
        GeminiDDP(model, *([None] * 31))


def test_states_of_gemini() -> None:
    model = built(shard_param=True)
    gemini = GeminiDDP(model, {}, mixed_precision=torch.float32)
    before = gemini.state_dict(only_rank_0=False)  # without an optimizer, too
    assert list(before) == list(model.state_dict())
    optimizer = GeminiOptimizer(HybridAdam(model.parameters(), lr=1e-2), gemini)
    train(gemini, optimizer)
    whole = gemini.state_dict(only_rank_0=False)
    parts = list(gemini.state_dict_shard(max_shard_size=0.01, only_rank_0=False))
    assert len(parts) > 1
    for part, size in parts:
        assert size == sum(value.nbytes for value in part.values()) / 2**20
        assert size <= 0.01 or len(part) == 1
    joined = {name: value for part, _ in parts for name, value in part.items()}
    assert list(joined) == list(whole)
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    assert len(list(gemini.state_dict_shard())) == 1
    assert next(iter(gemini.state_dict(prefix="a."))).startswith("a.")
    state = optimizer.state_dict(only_rank_0=False)
    optimizer.load_state_dict(state)
    assert all(map(torch.equal, whole.values(), gemini.state_dict().values()))


def test_parameters_that_gemini_ignores() -> None:
    frozen, trained = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    GeminiDDP.set_params_to_ignore(frozen.parameters())
    with pytest.raises(ValueError, match="requires gradients, and hetero manages all of a model"):
        GeminiDDP.set_params_to_ignore(trained.parameters())


def test_booster(tmp_path: Path, nothing_left: None) -> None:
    torch.manual_seed(0)
    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(adamw, 1, gamma=0.5)
    booster = Booster(plugin=GeminiPlugin(precision="fp32", placement_policy="auto", max_norm=0.05))
    boosted, optimizer, criterion, loader, scheduler = booster.boost(
        model, adamw, loss_of, [1, 2], scheduler
    )
    assert (criterion, loader) == (loss_of, [1, 2])

    def step(seed: int) -> None:
        booster.backward(loss_of(boosted, seed), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    for (seed,) in STEPS:
        step(seed)
    rates = [1e-2, 5e-3, 2.5e-3]
    assert_same(model, trained(STEPS, max_norm=0.05, rates=rates))
    for shard in (False, True):
        paths = [tmp_path / f"{name}-{shard}" for name in ("model", "optimizer", "scheduler")]
        booster.save_model(boosted, paths[0], shard=shard)
        booster.save_optimizer(optimizer, paths[1], shard=shard)
        booster.save_lr_scheduler(scheduler, paths[2])
        step(2)
        after = hetero.masters(model.parameters())
        booster.load_model(boosted, paths[0])
        booster.load_optimizer(optimizer, paths[1])
        booster.load_lr_scheduler(scheduler, paths[2])
        assert optimizer.param_groups[0]["lr"] == 1e-2 / 4
        step(2)
        assert all(map(torch.equal, after, hetero.masters(model.parameters())))
        booster.load_model(boosted, paths[0])
        booster.load_optimizer(optimizer, paths[1])
        booster.load_lr_scheduler(scheduler, paths[2])
    step(2)
    assert_same(model, trained([*STEPS, [2]], max_norm=0.05, rates=rates))
    with booster.no_sync(boosted, optimizer):
        booster.backward(loss_of(boosted), optimizer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: ZeroInitContext(CPU, shard_params=True), "did you mean shard_param"),
        (lambda m: ZeroInitContext(CPU, host_memry=3), "unknown key 'host_memry'"),
        (
            lambda m: ZeroInitContext(CPU, model_numel_tensor=torch.ones(1)),
            "numel.* counts them",
        ),
        (lambda m: ShardedModelV2(m, None, tensor_placement_polcy="cpu"), "tensor_placement_poli"),
        (lambda m: ShardedModelV2(m, None, tensor_placement_policy="gpu"), "placement_policy"),
        (lambda m: ShardedModelV2(GeminiDDP(m)), "GeminiDDP already|is a ShardedModelV2 already"),
        (lambda m: GeminiDDP(m, use_fp8=True), "hetero has no such feature"),
        (lambda m: GeminiDDP(m, mixed_precision=torch.int8), "must be a floating dtype"),
        (
            lambda m: ShardedOptimizerV2(m, HybridAdam(m.parameters())),
            "must be wrapped first.*is a Net",
        ),
        (
            lambda m: ShardedOptimizerV2(
                ShardedModelV2(m), HybridAdam(m.parameters()), inital_scale=3
            ),
            "did you mean initial_scale",
        ),
        (
            lambda m: ShardedOptimizerV2(
                ShardedModelV2(m), HybridAdam(m.parameters()), initial_scale=0.5
            ),
            "the first loss scale",
        ),
        (lambda m: GeminiPlugin(precision="int8"), "precision must be fp16, bf16 or fp32"),
        (lambda m: GeminiPlugin(enable_flash_attention=True), "optimized already"),
        (lambda m: GeminiPlugin(placement_polic="cpu"), "did you mean placement_policy"),
        (lambda m: Booster(plugin="gemini"), "must be a GeminiPlugin, not str"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Net())


def test_what_is_not_needed_is_named(not_needed: Callable[[], list[str]]) -> None:
    ShardedModelV2(Net(), None, reduce_scatter_bucket_size_mb=25)
    GeminiDDP(Net(), pin_memory=True)
    Booster(device="cuda", mixed_precision="fp16", plugin=GeminiPlugin(verbose=True))
    assert not_needed() == [
        "ShardedModelV2: reduce_scatter_bucket_size_mb",
        "GeminiDDP: pin_memory",
        "GeminiPlugin: verbose",
        "Booster: device",
        "Booster: mixed_precision",
    ]


def test_the_seed_and_dtype_of_construction() -> None:
    state = torch.get_rng_state()
    with ZeroInitContext(CPU, seed=7, default_dtype=torch.float64):
        model = nn.Linear(2, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32
    torch.manual_seed(7)
    assert torch.equal(model.weight.detach().clone(), nn.Linear(2, 2, dtype=torch.float64).weight)


def test_loggers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_dist_logger("of this test")
    assert get_dist_logger("of this test") is logger
    logger.log_to_file(tmp_path, suffix="a")
    with caplog.at_level(logging.INFO, "of this test"):
        logger.info("said", ranks=[0])
        logger.info("not said", ranks=[1])
        logger.warning("to all")
        logger.set_level("ERROR")
        logger.warning("too little")
        logger.error("enough")
        logger.debug("too little")
    assert caplog.messages == ["said", "to all", "enough"]
    assert (tmp_path / "rank_0_a.log").read_text().split() == ["said", "to", "all", "enough"]
    other = logging.getLogger("another of this test")
    disable_existing_loggers(include=["another of this test"])
    assert other.level == logging.ERROR
