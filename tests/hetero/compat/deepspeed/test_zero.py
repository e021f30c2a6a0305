"""hetero/compat/deepspeed/zero: construction, gathered parameters, tiled layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.compat import deepspeed
from hetero.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from hetero.stand_ins.construction_uses import arena_of
from tests.support.training.small_net import Net, assert_same, loss_of, trained

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
CONFIG: dict[str, Any] = {"optimizer": ADAMW, "gradient_clipping": 0.0}


def step(engine: deepspeed.DeepSpeedEngine) -> None:
    engine.backward(loss_of(engine))
    engine.step()


@pytest.mark.parametrize("remote", [None, "none", "cpu", OffloadDeviceEnum.nvme, "cuda:0"])
def test_options_may_come_with_initialize(
    remote: str | None, tmp_path: Path, nothing_left: None
) -> None:
    """The context knows nothing of NVMe, dtype and stage; the model is in RAM until then."""
    with pytest.raises(ValueError, match="remote_device must be None"):
        deepspeed.zero.Init(remote_device="disk")
    torch.manual_seed(0)
    with deepspeed.zero.Init(remote_device=remote):
        model = Net()
    config: dict[str, Any] = {**CONFIG, "zero_optimization": {"stage": 2}}
    if remote == "nvme":
        on_disk = {"device": "nvme", "nvme_path": str(tmp_path)}
        config["zero_optimization"] = {"stage": 3, "offload_param": on_disk}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    assert optimizer.engine.config.placement_policy == ("nvme" if remote == "nvme" else "auto")
    step(engine)
    assert_same(model, trained([[1]]))


def test_what_is_on_disk_already_keeps_its_budget(tmp_path: Path, nothing_left: None) -> None:
    on_disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    config: dict[str, Any] = {
        **CONFIG,
        "zero_optimization": {"stage": 3, "offload_param": on_disk},
        "hetero": {"host_memory": "192KiB", "chunk_numel": 4096},
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    other = {**config, "hetero": {"host_memory": "4MiB"}}
    with pytest.raises(hetero.HeteroError, match="built with other values of host_memory"):
        deepspeed.initialize(model=model, config=other)
    changed = {**config, "bf16": {"enabled": True}}
    _, optimizer, _, _ = deepspeed.initialize(model=model, config=changed)
    assert optimizer.engine.config.dtype == "bf16"


def test_models_of_heteros_own_context(tmp_path: Path, nothing_left: None) -> None:
    """Options may come late, but those of memory and disk."""
    torch.manual_seed(0)
    with hetero.ZeroInitContext(backend="auto"):
        model = Net()
    on_disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(hetero.HeteroError, match="built with other values of nvme_path"):
        deepspeed.initialize(
            model=model, config={**CONFIG, "zero_optimization": {"offload_param": on_disk}}
        )
    engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
    step(engine)
    assert_same(model, trained([[1]]))


def test_models_that_were_built_outside_and_plain_ones() -> None:
    torch.manual_seed(0)
    model = Net()
    deepspeed.zero.Init(module=model)
    assert arena_of(model.first.weight) is not None
    engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
    step(engine)
    assert_same(model, trained([[1]]))
    engine.destroy()
    with deepspeed.zero.Init(enabled=False):
        plain_model = Net()
    assert arena_of(plain_model.first.weight) is None


def test_a_context_inside_another_one() -> None:
    with deepspeed.zero.Init():
        with deepspeed.zero.Init():
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert arena_of(inner.weight) is arena_of(outer.weight) is not None


def test_gathered_parameters() -> None:
    with deepspeed.zero.Init():
        model = Net()
        with deepspeed.zero.GatheredParameters(model.scale, modifier_rank=0), torch.no_grad():
            model.scale.fill_(5.0)
    assert model.scale.item() == 5.0
    engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        nn.init.zeros_(model.last.weight)
    with deepspeed.zero.GatheredParameters(model.last.weight):
        assert model.last.weight.count_nonzero() == 0
    engine.destroy()
    other = nn.Linear(2, 2)
    for context in (
        deepspeed.zero.GatheredParameters(other.weight, modifier_rank=0),
        deepspeed.zero.GatheredParameters([], modifier_rank=0),
        deepspeed.zero.GatheredParameters(model.scale, enabled=False),
    ):
        with context:
            pass


def test_external_parameters() -> None:
    model = Net()
    assert deepspeed.zero.register_external_parameter(model, model.scale) is None
    assert deepspeed.zero.unregister_external_parameter(model, model.scale) is None


def test_a_tiled_layer_takes_the_values_of_a_plain_one() -> None:
    linear = nn.Linear(48, 64)
    tiled = deepspeed.zero.TiledLinear(48, 64, in_splits=2, out_splits=4, init_linear=linear)
    assert isinstance(tiled, hetero.TiledLinear)
    x = torch.randn(3, 48)
    torch.testing.assert_close(tiled(x), linear(x))
    with pytest.raises(ValueError, match=r"linear_cls must be torch\.nn\.Linear"):
        deepspeed.zero.TiledLinear(4, 4, linear_cls=nn.Bilinear)


def test_what_is_not_needed_is_named(not_needed: Callable[[], list[str]]) -> None:
    with deepspeed.zero.Init(pin_memory=True, mem_efficient_linear=False):
        model = nn.Linear(2, 2)
    with deepspeed.zero.GatheredParameters(model.weight, fwd_module=model):
        pass
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    assert not_needed() == [
        "zero.Init: mem_efficient_linear",
        "zero.Init: pin_memory",
        "zero.GatheredParameters: fwd_module",
        "init_distributed: auto_mpi_discovery",
    ]
