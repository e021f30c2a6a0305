"""hetero/compat/deepspeed/engine: DeepSpeed's loop, beside plain PyTorch's."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.compat import deepspeed
from hetero.compat.key_table import forget_logged
from tests.support.training.small_net import Net, assert_same, loss_of, plain, trained

pytestmark = pytest.mark.usefixtures("nothing_left")
Engine = deepspeed.DeepSpeedEngine
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}


def engine_of(**config: Any) -> Engine:
    """An engine over a net under seed 0."""
    torch.manual_seed(0)
    given = {"gradient_clipping": 0.0, "optimizer": ADAMW, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=given | config):
        model = Net()
    return deepspeed.initialize(model=model, config=given | config)[0]


def micro_batch(engine: Engine, seed: int) -> None:
    engine.backward(loss_of(engine, seed))
    engine.step()


@pytest.mark.parametrize("clipping", [0.05, 0.0])
def test_accumulation_and_clipping(clipping: float) -> None:
    """The tutorial's test has it of each stage. Without clipping there is a norm, too."""
    engine = engine_of(
        train_batch_size=12, train_micro_batch_size_per_gpu=4, gradient_clipping=clipping
    )
    expected, adamw = plain()
    for step in range(3):
        for micro in range(3):
            assert engine.is_gradient_accumulation_boundary() == (micro == 2)
            micro_batch(engine, 3 * step + micro)
            assert engine.was_step_applied() == (micro == 2)
            (loss_of(expected, 3 * step + micro) / 3).backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), clipping or torch.inf)
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        adamw.step()
        adamw.zero_grad()
        assert all(param.grad is None for param in engine.parameters())
    assert_same(engine.module, expected)
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (9, 3, 36)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (12, 3)
    assert engine.train_micro_batch_size_per_gpu() == 4
    assert engine.get_lr() == [1e-2]


def test_a_boundary_that_the_loop_sets() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    engine.set_gradient_accumulation_boundary(False)
    for seed in range(3):
        if seed == 2:
            engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine, seed), scale_wrt_gas=False)
        engine.step()
    assert_same(engine.module, trained([range(3)]))


def test_an_optimizer_that_a_function_makes() -> None:
    """Other tests give the object, or its configuration."""
    torch.manual_seed(0)
    model = Net()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=lambda params: deepspeed.ops.adam.DeepSpeedCPUAdam(params, lr=1e-2),
        model_parameters=model.parameters(),
        config={"bf16": {"enabled": False}, "gradient_clipping": 0.0},
    )
    micro_batch(engine, 1)
    assert_same(model, trained([[1]]))
    assert optimizer is engine.optimizer


@pytest.mark.parametrize(
    ("named", "reference"),
    [
        ({"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "AdamW"),
        (
            {"type": "adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}},
            "Adam",
        ),
        (
            {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}},
            "AdamW",
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


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"type": "Lamb"}, "hetero has no type 'Lamb'"),
        ({"type": "AdmaW"}, "did you mean AdamW"),
        ({"type": "AdamW", "params": {"learning_rate": 1}}, "unknown key 'learning_rate'"),
        ({"type": "AdamW", "params": {"amsgrad": True}}, "amsgrad=True is another update"),
    ],
)
def test_optimizers_that_cannot_be(named: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepspeed.initialize(model=Net(), config={"optimizer": named})


def test_schedulers_step_with_the_optimizer() -> None:
    params = {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}
    scheduler = {"type": "WarmupLR", "params": {**params, "warmup_type": "linear"}}
    engine = engine_of(gradient_accumulation_steps=2, scheduler=scheduler)
    rates = [1e-3, 1e-3, 4e-3, 7e-3, 1e-2]
    steps = [(2 * step, 2 * step + 1) for step in range(5)]
    for rate, seeds in zip(rates, steps, strict=True):
        assert engine.get_lr() == pytest.approx([rate])
        for seed in seeds:
            micro_batch(engine, seed)
    assert_same(engine.module, trained(steps, share=0.5, rates=rates))


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


def test_fp16_trains_as_a_grad_scaler_does() -> None:
    engine = engine_of(fp16={"enabled": True, "loss_scale": 256}, gradient_clipping=0.05)
    torch.manual_seed(0)
    with hetero.ZeroInitContext(dtype="fp16", initial_loss_scale=None):
        model = Net()
        with torch.no_grad():
            for param in model.parameters():  # as DeepSpeed's masters begin
                param.copy_(param.half())
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


def test_gradients_in_bf16_need_not_be_checked() -> None:
    """As test_what_is_not_given... has it where they are."""
    engine = engine_of(bf16={"enabled": True, "check_grad_overflow": False})
    masters = hetero.masters(engine.module.parameters())
    assert all(torch.equal(each, each.bfloat16().float()) for each in masters), "as they begin"
    engine.backward(loss_of(engine) * float("inf"))
    engine.step()
    assert (engine.skipped_steps, engine.was_step_applied()) == (0, True)
    assert not all(m.isfinite().all() for m in hetero.masters(engine.module.parameters()))
    assert engine.cur_scale == 1.0


def test_a_backward_of_the_loops_own() -> None:
    """It has the bits of engine.backward(): divided by the micro-batches, under fp16 times the
    scale that scale() has put on; without scale() each is refused."""
    found: list[list[Any]] = []
    for own in (False, True):
        engine = engine_of(fp16={"enabled": True, "loss_scale": 256}, gradient_accumulation_steps=2)
        for seed in range(2):
            loss = loss_of(engine, seed)
            if own:
                with pytest.raises(RuntimeError, match="Loss scaling is required"):
                    loss.backward(retain_graph=True)
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        assert engine.global_steps == 1
        found.append(hetero.masters(engine.module.parameters()))
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][0], plain()[0].first.weight)


class WithLoss(Net):
    """Gives a loss beside the output that it is made of, as transformers' models do."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return {"loss": (y - 1).square().mean(), "logits": y}


def assert_divides_once(
    make: Callable[[], torch.nn.Module], name: str, loss_of: Callable[[Any], torch.Tensor]
) -> None:
    """A backward of the loop's own divides by the micro-batches as engine.backward() does: compared
    by the gradient of the parameter `name`; `loss_of` gets the engine."""
    found = []
    for own in (False, True):
        torch.manual_seed(0)
        config = {"gradient_accumulation_steps": 4, "optimizer": ADAMW}
        engine, _, _, _ = deepspeed.initialize(model=make(), config=config)
        loss = loss_of(engine)
        if own:
            loss.backward()
        else:
            engine.backward(loss)
        found.append(hetero.grads(engine.module.get_parameter(name))[0])
    torch.testing.assert_close(*found)


def test_outputs_that_are_made_of_others() -> None:
    def loss_of(engine: Any) -> torch.Tensor:
        outputs = engine(torch.ones(2, 64))
        loss: torch.Tensor = outputs["loss"] + outputs["logits"].square().mean()
        return loss

    assert_divides_once(WithLoss, "first.weight", loss_of)


class WithoutGradient(torch.autograd.Function):
    """Sums, and gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


def test_an_output_may_get_no_gradient() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    WithoutGradient.apply(engine(torch.ones(2, 64))).backward()
    assert engine.module.first.weight.grad is None


class WithHead(torch.nn.Module):
    """Its logits' loss is in tiles, whose gradients pass no hook of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> Any:
        return {"logits": self.head(self.embedding(tokens)), "tokens": tokens}


@pytest.mark.parametrize("tiled", [False, True])
def test_a_loss_of_deferred_logits(tiled: bool) -> None:
    def make() -> torch.nn.Module:
        model = WithHead()
        hetero.tile_heads(model, tile_tokens=16)
        return model

    def loss_of(engine: Any) -> torch.Tensor:
        tokens = torch.arange(64)
        logits = engine(tokens)["logits"]
        if not tiled:
            logits = logits + 0  # whole
        return torch.nn.functional.cross_entropy(logits, tokens)

    assert_divides_once(make, "head.weight", loss_of)


def test_the_loss_is_a_scalar() -> None:
    engine = engine_of()
    for call in (engine.scale, engine.backward):
        with pytest.raises(AssertionError, match="scalar tensor"):
            call(engine(torch.ones(2, 64)))
        with pytest.raises(AssertionError, match="scalar tensor"):
            call(torch.tensor(1.0))


def test_steps_that_the_loop_ends() -> None:
    """managed_gradient_accumulation=False: each step() updates, after any number of backwards."""
    engine = engine_of(managed_gradient_accumulation=False, gradient_accumulation_steps=4)
    steps = [(0,), (1, 2, 3)]
    for seeds in steps:
        for seed in seeds:
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward(loss_of(engine, seed))
        engine.step()
    assert_same(engine.module, trained(steps, share=1 / 4))
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (2, 4, 2)
    for call in (lambda: engine.set_gradient_accumulation_boundary(True), entered(engine)):
        with pytest.raises(AssertionError, match="managed_gradient_accumulation=False"):
            call()


def entered(engine: Any) -> Any:
    def enter() -> None:
        engine.empty_partition_cache()
        with engine.coalesce_grad_reduction():
            pass

    return enter


def test_steps_and_blocks_inside_no_sync_are_refused() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    with engine.no_sync():
        with pytest.raises(AssertionError, match="illegal to call Engine.step"):
            engine.step()
        with pytest.raises(AssertionError, match="reentry is unsupported"):
            entered(engine)()
    engine.set_gradient_accumulation_boundary(True)
    with engine.coalesce_grad_reduction():
        for seed in range(2):
            engine.backward(loss_of(engine, seed))
    engine.step()
    assert_same(engine.module, trained([range(2)], share=0.5))


def test_what_is_not_given_is_as_in_the_release_that_is_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """0.19.8 clips to 1.0 and leaves out steps that are not finite under bf16; older ones did not,
    which is said once."""
    forget_logged()
    engine, _, _, _ = deepspeed.initialize(
        model=Net(), config={"optimizer": ADAMW, "bf16": {"enabled": True}}
    )
    assert engine.gradient_clipping() == 1.0
    assert sum("gradient_clipping is absent" in said for said in caplog.messages) == 1
    assert sum("check_grad_overflow is absent" in said for said in caplog.messages) == 1
    engine.backward(loss_of(engine) * 1e6)
    engine.step()
    assert (engine.get_global_grad_norm() or 0) > 1e3
    engine.backward(loss_of(engine) * float("inf"))
    engine.step()
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
    assert all(bool(m.isfinite().all()) for m in hetero.masters(engine.module.parameters()))


def test_the_models_attributes_are_the_engines() -> None:
    engine = engine_of()
    model = engine.module
    model.magic = 42
    assert engine.magic == 42
    assert engine.first is model.first
    assert not hasattr(engine, "nothing_of_the_kind")
    assert engine.get_mom() == [(0.9, 0.999)]
    engine.set_train_batch_size(6)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (6, 6)
    assert deepspeed.DeepSpeedEngine.train_batch_size(engine) == 6
    engine.set_train_micro_batch_size(2)
    with pytest.raises(ValueError, match="must be a multiple of 2"):
        engine.set_train_batch_size(3)
    frozen = model.unused.weight.requires_grad_(False)
    assert {n for n, _ in model.named_parameters()} - engine.module_state_dict(True).keys() == {
        "unused.weight"
    }
    assert frozen.requires_grad is False


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


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    engine = engine_of(scheduler={"type": "WarmupLR", "params": {}})
    assert engine.load_checkpoint(tmp_path) == (None, None)
    micro_batch(engine, 1)
    engine.save_checkpoint(tmp_path, tag=0, save_latest=False)  # loops give their step
    assert not (tmp_path / "latest").exists()
    wanted = hetero.masters(engine.module.parameters())
    micro_batch(engine, 2)
    rate = engine.get_lr()
    path, _ = engine.load_checkpoint(tmp_path, tag=0, load_module_only=True)
    assert path == str(tmp_path / "0")
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", [False, True])
def test_an_engine_for_inference(inside: bool, dtype: torch.dtype) -> None:
    """Without an optimizer the model computes in the dtype that the configuration says."""
    torch.manual_seed(0)
    config = {"bf16": {"enabled": dtype is torch.bfloat16}, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=inside):
        model = Net()
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=config)
    assert (optimizer, loader, scheduler) == (None, None, None)
    x = torch.ones(2, 64)
    expected = plain()[0].to(dtype)(x.to(dtype))
    found = engine(x.to(dtype))
    assert found.dtype == engine.dtype == dtype
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="this engine has no optimizer"):
        engine.backward(loss_of(engine))


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


def test_activation_checkpoints_are_torchs() -> None:
    engine = engine_of()
    deepspeed.checkpointing.configure(None, partition_activations=True)
    assert deepspeed.checkpointing.is_configured()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    engine.backward((deepspeed.checkpointing.checkpoint(engine, x) - 1).square().mean())
    engine.step()
    assert_same(engine.module, trained([[1]]))
