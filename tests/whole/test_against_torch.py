"""The oracle is plain PyTorch in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hetero
from tests.support.training.loops import batches, build, tiny_gpt2, train
from tests.support.training.plain_adam import Master

LR = 1e-3


@pytest.mark.parametrize("policy", ["cpu", "nvme"])
def test_fp32_equals_torch_to_rounding(policy: str, tmp_path: Path) -> None:
    """10 steps of AdamW with clipping against torch.optim.AdamW.

    The bound: both compute the same formulas in fp32, in another order of rounding, so an update
    (about lr in size, whatever the gradient) differs by a few units of 2^-24 of its inputs. Where
    |gradient| is near eps = 1e-8 the update m / (sqrt(v) + eps) amplifies a rounding of the
    gradient itself; such elements may differ by a share of lr. So: losses within 1e-5 relative,
    all weights within 5 % of the distance that 10 updates can move them, all but 0.1 % of them
    within 1e-6.
    """
    steps = 10
    data = batches(steps)
    model, optimizer = build(placement_policy=policy, dtype="fp32", nvme_path=str(tmp_path), lr=LR)
    run = train(model, optimizer, data, clip=1.0)

    torch.manual_seed(0)
    plain = tiny_gpt2()
    adam = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.1)
    losses = []
    for tokens in data:
        loss = plain(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())

    np.testing.assert_allclose(run.losses, losses, rtol=1e-5)
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    found = torch.cat([p.flatten() for p in run.params])
    difference = (found - expected).abs()
    assert difference.max() < 0.05 * steps * LR
    assert (difference > 1e-6).float().mean() < 1e-3
    assert all(map(torch.equal, run.params, run.masters)), "in fp32 the parameter is the master"


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_masters_equal_the_documented_adam_exactly(
    dtype: str, adamw_mode: bool, tmp_path: Path
) -> None:
    """The oracle in numpy is fed the gradients that autograd gave; not a bit may differ."""
    torch.manual_seed(0)
    with hetero.ZeroInitContext(placement_policy="nvme", dtype=dtype, nvme_path=str(tmp_path)):
        model = tiny_gpt2()
    params = list(model.parameters())
    groups = [
        {"params": params[:5], "lr": 3e-3, "betas": (0.8, 0.95)},
        {"params": params[5:], "weight_decay": 0.1},
    ]
    optimizer = hetero.HybridAdam(groups, lr=1e-3, adamw_mode=adamw_mode)
    model, optimizer = hetero.initialize(model, optimizer, None)
    masters = [Master(value) for value in hetero.masters(params)]
    gradients: dict[int, torch.Tensor] = {}
    for index, param in enumerate(params):
        param.register_hook(lambda grad, index=index: gradients.__setitem__(index, grad.clone()))

    for tokens in batches(4):
        scale = optimizer.engine.shared.loss_scale.value
        optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
        norm = optimizer.engine.grad_norm(params)
        clip = min(1.0, 0.5 / (norm + 1e-6))
        assert clip < 1
        assert hetero.clip_grad_norm_(params, 0.5).item() == pytest.approx(norm, rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        for index, master in enumerate(masters):
            group = optimizer.param_groups[0 if index < 5 else 1]
            master.update(
                gradients[index],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                decoupled=adamw_mode,
                grad_scale=clip / scale,
            )

    for param, master, found in zip(params, masters, hetero.masters(params), strict=True):
        assert torch.equal(found, master.weight)
        with hetero.gathered(param):
            assert torch.equal(param, master.weight.to(param.dtype))
    state = optimizer.state_dict()["state"]
    for index, master in enumerate(masters):
        for key, expected in master.state.items():
            assert torch.equal(state[index][key], expected), key
    optimizer.engine.close()
