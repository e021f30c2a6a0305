"""hetero/compat/deepspeed/utils: masters, gradients and states, read and changed; marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.compat import deepspeed
from hetero.compat.deepspeed import utils
from tests.support.compat import deepspeed_ranks
from tests.support.ranks.processes import RankPool
from tests.support.training.small_net import Net, loss_of

pytestmark = pytest.mark.usefixtures("nothing_left")


def engine_of(tmp_path: Path, device: str = "cpu", **config: Any) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    given = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": device, "nvme_path": str(tmp_path)},
        },
        **config,
    }
    model = Net()
    model.unused.requires_grad_(False)
    return deepspeed.initialize(model=model, config=given)[0]


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_what_was_set_is_found(device: str, tmp_path: Path) -> None:
    engine = engine_of(tmp_path, device)
    param, frozen = engine.module.first.weight, engine.module.unused.weight
    engine.backward(loss_of(engine))
    grad = utils.safe_get_full_grad(param)
    assert grad is not None
    assert grad.dtype == torch.bfloat16
    assert grad.any()
    new = torch.rand(param.shape, dtype=torch.bfloat16)
    utils.safe_set_full_grad(param, new)
    assert torch.equal(utils.safe_get_full_grad(param), new)
    utils.safe_update_full_grad_vectorized([param, frozen], lambda grad, of: grad * 2)
    assert torch.equal(utils.safe_get_full_grad(param), new * 2)
    engine.step()
    for get, set_ in (
        (utils.safe_get_full_fp32_param, utils.safe_set_full_fp32_param),
        (utils.safe_get_local_fp32_param, utils.safe_set_local_fp32_param),
    ):
        values = torch.rand(get(param).shape)
        set_(param, values)
        assert torch.equal(get(param), values)
        assert torch.equal(param.detach().reshape(values.shape), values.bfloat16())
        assert get(frozen) is None
    for key in ("exp_avg", "exp_avg_sq"):
        values = torch.rand(param.shape)
        utils.safe_set_full_optimizer_state(param, values, key)
        found = utils.safe_get_full_optimizer_state(param, key)
        torch.testing.assert_close(found, values, rtol=2**-20, atol=0)
        assert utils.safe_get_full_optimizer_state(frozen, key) is None
    with pytest.raises(ValueError, match="there is no state 'momentum'; there are exp_avg"):
        utils.safe_set_full_optimizer_state(param, values, "momentum")
    assert utils.safe_get_full_optimizer_state(param, "momentum") is None


def test_parameters_that_no_engine_has() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    assert utils.safe_get_full_grad(param) is utils.safe_get_full_fp32_param(param) is None
    utils.safe_set_full_grad(param, torch.ones(3))
    assert torch.equal(utils.safe_get_full_grad(param), torch.ones(3))


def test_parts_of_two_ranks(ranks2: RankPool) -> None:
    for found in ranks2.run(deepspeed_ranks.parts_of_a_parameter):
        assert found == []


def test_leaf_modules_are_marked() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    assert utils.set_z3_leaf_modules(model, [torch.nn.Linear]) == [model[0]]
    assert utils.set_z3_leaf_modules(model, ["ReLU"]) == [model[1]]
    assert utils.get_z3_leaf_modules(model) == [model[0], model[1]]
    assert utils.unset_z3_leaf_modules(model, [torch.nn.ReLU]) == [model[1]]
    assert utils.set_z3_leaf_modules_by_name(model, ["1"]) == [model[1]]
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0"]) == [model[0]]
    with pytest.raises(ValueError, match="no module of the model is one of"):
        utils.set_z3_leaf_modules(model, [torch.nn.Bilinear])


def test_on_device() -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = torch.nn.Linear(2, 2)
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.bfloat16)
    with deepspeed.OnDevice(dtype=torch.bfloat16, enabled=False):
        assert torch.empty(1).dtype == torch.float32


def test_the_masters_of_a_checkpoint(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "cpu")
    engine.backward(loss_of(engine))
    engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    found = utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    trained = utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path / "saved", exclude_frozen_parameters=True
    )
    masters = {n: utils.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    assert found.keys() == engine.module.state_dict().keys()
    for name, master in masters.items():
        if master is None:
            assert name not in trained
        else:
            assert torch.equal(found[name], master)
            assert torch.equal(trained[name], master)
    plain = utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(Net(), tmp_path / "saved")
    assert torch.equal(plain.first.weight, found["first.weight"])
