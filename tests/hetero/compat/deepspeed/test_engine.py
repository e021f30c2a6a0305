"""hetero/compat/deepspeed/engine: DeepSpeed's loop, beside plain PyTorch's."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.compat import deepspeed
from tests.support.training.small_net import Net, assert_same, loss_of, plain

pytestmark = pytest.mark.usefixtures("nothing_left")

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}


def engine_of(**config: Any) -> deepspeed.DeepSpeedEngine:
    """An engine over a net under seed 0."""
    torch.manual_seed(0)
    config = {"optimizer": ADAMW, "zero_optimization": {"stage": 3}, **config}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Net()
    return deepspeed.initialize(model=model, config=config)[0]


def micro_batch(engine: deepspeed.DeepSpeedEngine, seed: int) -> None:
    engine.backward(loss_of(engine, seed))
    engine.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_and_clipping(stage: int) -> None:
    engine = engine_of(
        train_batch_size=12,
        train_micro_batch_size_per_gpu=4,
        gradient_clipping=0.05,
        zero_optimization={"stage": stage},
    )
    expected, adamw = plain()
    for step in range(3):
        for micro in range(3):
            assert engine.is_gradient_accumulation_boundary() == (micro == 2)
            micro_batch(engine, 3 * step + micro)
            assert engine.was_step_applied() == (micro == 2)
            (loss_of(expected, 3 * step + micro) / 3).backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        adamw.step()
        adamw.zero_grad()
        assert all(param.grad is None for param in engine.parameters())
    assert_same(engine.module, expected)
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (9, 3, 36)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (12, 3)
    assert engine.train_micro_batch_size_per_gpu() == 4
    assert engine.zero_optimization_stage() == stage
    assert engine.get_lr() == [1e-2]
    engine.destroy()


def test_a_boundary_that_the_loop_sets() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    expected, adamw = plain()
    engine.set_gradient_accumulation_boundary(False)
    for seed in range(3):
        if seed == 2:
            engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine, seed), scale_wrt_gas=False)
        engine.step()
        loss_of(expected, seed).backward()
    adamw.step()
    assert_same(engine.module, expected)
    engine.destroy()


@pytest.mark.parametrize("made", ["object", "function", "configured"])
def test_where_the_optimizer_comes_from(made: str) -> None:
    torch.manual_seed(0)
    model = Net()
    expected, adamw = plain()

    def make(params: Any) -> torch.optim.Optimizer:
        return deepspeed.ops.adam.DeepSpeedCPUAdam(params, lr=1e-2)

    config: dict[str, Any] = {"bf16": {"enabled": False}}
    if made == "configured":
        config["optimizer"] = ADAMW
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, config=config, model_parameters=model.parameters()
        )
    else:
        optimizer = make(model.parameters()) if made == "object" else make
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config
        )
    micro_batch(engine, 1)
    loss_of(expected).backward()
    adamw.step()
    assert_same(model, expected)
    assert optimizer is engine.optimizer
    engine.destroy()


@pytest.mark.parametrize(
    ("named", "reference"),
    [
        ({"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "AdamW"),
        (
            {"type": "adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}},
            "Adam",
        ),
        ({"type": "SGD", "params": {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}}, "SGD"),
        ({"type": "Adagrad", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "Adagrad"),
    ],
)
def test_optimizers_by_name(named: dict[str, Any], reference: str) -> None:
    engine = engine_of(optimizer=named)
    torch.manual_seed(0)
    expected = Net()
    more = {"momentum": 0.9} if reference == "SGD" else {}
    update = getattr(torch.optim, reference)(
        expected.parameters(), lr=1e-2, weight_decay=0.1, **more
    )
    for seed in range(3):
        micro_batch(engine, seed)
        update.zero_grad()
        loss_of(expected, seed).backward()
        update.step()
    assert_same(engine.module, expected)
    engine.destroy()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"type": "Lamb"}, "'Lamb' is none that hetero has"),
        ({"type": "AdmaW"}, "did you mean AdamW"),
        ({"type": "AdamW", "params": {"learning_rate": 1}}, "unknown key 'learning_rate'"),
        ({"type": "AdamW", "params": {"amsgrad": True}}, "amsgrad=True is another update"),
    ],
)
def test_optimizers_that_cannot_be(named: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepspeed.initialize(model=Net(), config={"optimizer": named})


def test_schedulers_step_with_the_optimizer() -> None:
    engine = engine_of(
        gradient_accumulation_steps=2,
        scheduler={
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 1e-3,
                "warmup_max_lr": 1e-2,
                "warmup_num_steps": 3,
                "warmup_type": "linear",
            },
        },
    )
    expected, adamw = plain()
    for step, lr in enumerate([1e-3, 1e-3, 4e-3, 7e-3, 1e-2]):
        assert engine.get_lr() == pytest.approx([lr])
        adamw.param_groups[0]["lr"] = lr
        for seed in (2 * step, 2 * step + 1):
            micro_batch(engine, seed)
            (loss_of(expected, seed) / 2).backward()
        adamw.step()
        adamw.zero_grad()
    assert_same(engine.module, expected)
    engine.destroy()


def test_fp16_skips_overflows_and_keeps_the_schedulers_rate() -> None:
    engine = engine_of(
        fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 1},
        scheduler={"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    )
    before = [m.clone() for m in hetero.masters(engine.module.parameters())]
    engine.backward(loss_of(engine) * 1e6)
    engine.step()
    assert (engine.skipped_steps, engine.was_step_applied(), engine.cur_scale) == (1, False, 8.0)
    assert engine.get_lr() == [1e-2]
    assert all(map(torch.equal, before, hetero.masters(engine.module.parameters())))
    for _ in range(2):
        micro_batch(engine, 1)
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (3, 1, 16.0)
    assert engine.get_lr() == [2.5e-3]
    assert engine.fp16_enabled()
    assert not engine.bfloat16_enabled()
    engine.destroy()


def test_fp16_trains_as_a_grad_scaler_does() -> None:
    engine = engine_of(fp16={"enabled": True, "loss_scale": 256}, gradient_clipping=0.05)
    torch.manual_seed(0)
    with hetero.ZeroInitContext(dtype="fp16", initial_loss_scale=None):
        model = Net()
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-2))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for seed in range(3):
        micro_batch(engine, seed)
        scaler.scale(loss_of(model, seed)).backward()
        scaler.unscale_(optimizer)
        hetero.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found, wanted = (hetero.masters(m.parameters()) for m in (engine.module, model))
    assert all(map(torch.equal, found, wanted))
    engine.destroy()
    optimizer.engine.close()


@pytest.mark.parametrize("checked", [False, True])
def test_gradients_in_bf16_may_be_checked(checked: bool) -> None:
    engine = engine_of(bf16={"enabled": True, "check_grad_overflow": checked})
    engine.backward(loss_of(engine) * float("inf"))
    engine.step()
    assert (engine.skipped_steps, engine.was_step_applied()) == (int(checked), not checked)
    finite = all(bool(m.isfinite().all()) for m in hetero.masters(engine.module.parameters()))
    assert finite == checked
    assert engine.cur_scale == 1.0
    engine.destroy()


def test_a_backward_of_the_loops_own_is_not_scaled() -> None:
    engine = engine_of(fp16={"enabled": True, "loss_scale": 256})
    loss_of(engine).backward()
    found = hetero.grads(engine.module.parameters())
    seen: list[Any] = []
    step = engine.optimizer.step
    engine.optimizer.step = lambda: (
        seen.extend(hetero.grads(engine.module.parameters())),
        step(),
    )
    engine.step()
    for before, then in zip(found, seen, strict=True):
        assert before is then is None or torch.equal(before, then)
    engine.destroy()


def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    config = {
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 2},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }
    engine = engine_of(**config)
    for seed in range(4):
        micro_batch(engine, seed)
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    assert (tmp_path / "latest").read_text() == "global_step2"
    for seed in range(4, 8):
        micro_batch(engine, seed)
    wanted = hetero.masters(engine.module.parameters())
    rate, scale = engine.get_lr(), engine.loss_scale
    engine.destroy()

    other = engine_of(**config)
    path, client_state = other.load_checkpoint(tmp_path)
    assert (path, client_state) == (str(tmp_path / "global_step2"), {"epoch": 3})
    assert (other.global_steps, other.micro_steps, other.global_samples) == (2, 4, 4)
    for seed in range(4, 8):
        micro_batch(other, seed)
    assert all(map(torch.equal, hetero.masters(other.module.parameters()), wanted))
    assert (other.get_lr(), other.loss_scale) == (rate, scale)
    other.destroy()


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    engine = engine_of(scheduler={"type": "WarmupLR", "params": {}})
    assert engine.load_checkpoint(tmp_path) == (None, {})
    micro_batch(engine, 1)
    engine.save_checkpoint(tmp_path, tag="mine", save_latest=False)
    assert not (tmp_path / "latest").exists()
    wanted = hetero.masters(engine.module.parameters())
    micro_batch(engine, 2)
    rate = engine.get_lr()
    path, _ = engine.load_checkpoint(tmp_path, tag="mine", load_module_only=True)
    assert path == str(tmp_path / "mine")
    assert all(map(torch.equal, hetero.masters(engine.module.parameters()), wanted))
    assert (engine.get_lr(), engine.global_steps) == (rate, 2)
    with pytest.raises(ValueError, match="load_module_strict=False"):
        engine.load_checkpoint(tmp_path, load_module_strict=False)
    hetero.save(tmp_path / "plain", engine.module, engine.optimizer)
    with pytest.raises(hetero.CheckpointError, match="not saved by save_checkpoint"):
        engine.load_checkpoint(tmp_path, tag="plain", load_module_only=True)
    engine.save_16bit_model(tmp_path / "out")
    saved = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert saved.keys() == engine.module.state_dict().keys()
    engine.destroy()


def test_an_engine_for_inference() -> None:
    torch.manual_seed(0)
    model = Net()
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config={})
    assert (optimizer, loader, scheduler) == (None, None, None)
    assert torch.equal(loss_of(engine), loss_of(plain()[0]))
    with pytest.raises(ValueError, match="this engine has no optimizer"):
        engine.backward(loss_of(engine))
    engine.destroy()


def test_the_command_line_and_the_loader(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": ADAMW, "train_micro_batch_size_per_gpu": 4}))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(10, 64))
    engine, _, loader, _ = deepspeed.initialize(args=args, model=Net(), training_data=data)
    assert [len(x) for (x,) in loader] == [4, 4, 2]
    for (x,) in loader:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 3
    engine.destroy()
    with pytest.raises(ValueError, match="one configuration and got 2"):
        deepspeed.initialize(args=args, model=Net(), config={})
    with pytest.raises(ValueError, match="needs a model"):
        deepspeed.initialize(config={})


def test_steps_are_printed(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(steps_per_print=2)
    with caplog.at_level(logging.INFO, "hetero.compat"):
        for seed in range(4):
            micro_batch(engine, seed)
    assert [m for m in caplog.messages if m.startswith("step=")] == [
        "step=2, skipped=0, lr=[0.01]",
        "step=4, skipped=0, lr=[0.01]",
    ]
    engine.destroy()


def test_activation_checkpoints_are_torchs() -> None:
    engine = engine_of()
    expected, adamw = plain()
    deepspeed.checkpointing.configure(None, partition_activations=True)
    assert deepspeed.checkpointing.is_configured()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    engine.backward((deepspeed.checkpointing.checkpoint(engine, x) - 1).square().mean())
    engine.step()
    loss_of(expected).backward()
    adamw.step()
    assert_same(engine.module, expected)
    engine.destroy()
