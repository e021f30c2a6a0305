"""Every optimizer and state dtype: documented numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import hetero
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Account, Tier
from tests.support.native.update_oracle import Hyper, stored, update, without_tie

Make = Callable[..., hetero.HybridOptimizer]
# Makers and the same options for the oracle.
OPTIMIZERS: dict[str, tuple[Make, dict[str, float | bool]]] = {
    "adam": (hetero.HybridAdam, {"decoupled": True, "weight_decay": 0.1, "lr": 1e-2}),
    "lion": (hetero.HybridLion, {"decoupled": True, "weight_decay": 0.1, "lr": 1e-3}),
    "adagrad": (hetero.HybridAdagrad, {"weight_decay": 0.01, "lr": 1e-2, "lr_decay": 0.1}),
    "sgd": (
        hetero.HybridSGD,
        {"weight_decay": 0.01, "lr": 0.1, "momentum": 0.9, "dampening": 0.3},
    ),
}
# Parameter and state dtypes meet in every way at least once; test_parity and test_against_torch
# have Adam with states in fp32.
CASES = [
    ("adam", "bf16", "bf16"),
    ("lion", "fp32", "fp32"),
    ("lion", "bf16", "bf16"),
    ("adagrad", "bf16", "fp32"),
    ("adagrad", "fp16", "bf16"),
    ("sgd", "bf16", "fp32"),
    ("sgd", "fp16", "bf16"),
    ("sgd", "fp32", "fp32"),
    ("adam", "fp32", "8bit"),
    ("adagrad", "fp16", "8bit"),
    ("sgd", "bf16", "8bit"),
]


def net() -> torch.nn.Module:
    """With a parameter whose last block of 64 is not whole."""
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 33))


def build(
    rule: str, dtype: str, state_dtype: str, **options: object
) -> tuple[torch.nn.Module, hetero.HybridOptimizer]:
    torch.manual_seed(0)
    with hetero.ZeroInitContext(dtype=dtype, initial_loss_scale=256.0, **options):
        model = net()
    make, given = OPTIMIZERS[rule]
    arguments = {key: value for key, value in given.items() if key != "decoupled"}
    optimizer = make(model.parameters(), state_dtype=state_dtype, **arguments)
    return hetero.initialize(model, optimizer)


@pytest.mark.parametrize(("rule", "dtype", "state_dtype"), CASES)
def test_masters_and_states_equal_the_documented_rule_exactly(
    rule: str, dtype: str, state_dtype: str, tmp_path: Path
) -> None:
    model, optimizer = build(
        rule,
        dtype,
        state_dtype,
        placement_policy="nvme",
        nvme_path=str(tmp_path),
        chunk_numel=4096,
    )
    params = list(model.parameters())
    # Elements are numbered through the model; the random bits of states come from there.
    first = np.cumsum([0] + [p.numel() for p in params])
    weights = [m.numpy().reshape(-1).copy() for m in hetero.masters(params)]
    count = len(optimizer.state_names)
    states = [tuple(np.zeros_like(w) for _ in range(count)) for w in weights]
    gradients: dict[int, torch.Tensor] = {}
    for index, param in enumerate(params):
        param.register_hook(lambda grad, index=index: gradients.__setitem__(index, grad.clone()))

    for step in range(1, 4):
        scale = optimizer.engine.shared.loss_scale.value
        x = torch.randn(9, 64, generator=torch.Generator().manual_seed(step))
        optimizer.backward(model(x.to(params[0].dtype)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        options = dict(OPTIMIZERS[rule][1])
        if rule == "lion":
            options["beta2"] = 0.99
        if rule == "adagrad":
            options["eps"] = 1e-10
        hyper = Hyper(step=step, grad_scale=1 / scale, **options)
        for index, weight in enumerate(weights):
            gradient = gradients[index].float().numpy().reshape(-1)
            weights[index], computed = update(rule, weight, states[index], gradient, hyper)
            if (dtype, state_dtype) == ("bf16", "8bit"):
                weights[index] = without_tie(weights[index])
            states[index] = stored(rule, dtype, state_dtype, computed, step, int(first[index]))

    for weight, master in zip(weights, hetero.masters(params), strict=True):
        assert torch.equal(master, torch.from_numpy(weight).view(master.shape))
    saved = optimizer.state_dict()["state"]
    for index, expected in enumerate(states):
        for name, values in zip(optimizer.state_names, expected, strict=True):
            assert torch.equal(saved[index][name].view(-1), torch.from_numpy(values))
    optimizer.engine.close()


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_records_take_what_the_rule_needs(rule: str, state_dtype: str) -> None:
    """Beside a remainder of 2 bytes: of each state 2, or 1 and a scale of 4 for 64, in pages."""
    _, optimizer = build(rule, "bf16", state_dtype, placement_policy="cpu")
    engine = optimizer.engine
    slot_numel, states = engine.layout.slot_numel, len(optimizer.state_names)
    state_bytes = 2 * slot_numel if state_dtype == "bf16" else slot_numel + 4 * slot_numel // 64
    slot_bytes = round_up(2 * slot_numel + states * state_bytes, PAGE_BYTES)
    assert engine.chunk_groups[0].dtypes.optim_state_bytes(slot_numel) == slot_bytes
    slots = sum(chunk.slots for chunk in engine.layout.chunks)
    used = engine.ledger.used(Tier.HOST, Account.OPTIM_STATE)
    assert used == slots * slot_bytes
    engine.close()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (hetero.HybridLion, {"lr": -1}, "lr must be a finite number, 0 or more, not -1"),
        (hetero.HybridLion, {"betas": (1.0, 0.9)}, "betas must be two numbers in"),
        (hetero.HybridAdam, {"betas": (0.9, 0.99, 0.9)}, "betas must be two numbers in"),
        (hetero.HybridAdam, {"betas": 0.9}, "betas must be two numbers in"),
        (hetero.HybridAdam, {"lr": float("inf")}, "lr must be a finite number, 0 or more, not inf"),
        (hetero.HybridAdam, {"weight_decay": None}, "weight_decay must be a finite number"),
        (hetero.HybridAdagrad, {"lr_decay": -0.5}, "lr_decay must be a finite number"),
        (
            hetero.HybridAdagrad,
            {"eps": float("nan")},
            "eps must be a finite number, .* not nan",
        ),
        (hetero.HybridSGD, {"momentum": -0.1}, "momentum must be a finite number, 0 or more"),
        (hetero.HybridSGD, {"dampening": float("nan")}, "dampening must be a finite number"),
        (
            hetero.HybridSGD,
            {"nesterov": True},
            "nesterov needs momentum and no dampening, and momentum is 0.0 and dampening 0.0",
        ),
        (
            hetero.HybridSGD,
            {"momentum": 0.9, "dampening": 0.1, "nesterov": True},
            "nesterov needs momentum and no dampening, and momentum is 0.9 and dampening 0.1",
        ),
        (
            hetero.HybridAdam,
            {"state_dtype": "fp16"},
            "state_dtype must be fp32, bf16 or 8bit, not 'fp16'",
        ),
    ],
)
def test_options_out_of_range(make: Make, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([torch.nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize(
    ("saving", "loading", "message"),
    [
        ("adam", "adagrad", "is not HybridAdagrad's: it lacks lr_decay"),
        ("adam", "lion", "has 'exp_avg_sq', which HybridLion does not have"),
        ("lion", "adam", "is not HybridAdam's: it lacks eps"),
        ("sgd", "lion", "is not HybridLion's: it lacks betas"),
        ("adagrad", "sgd", "is not HybridSGD's: it lacks dampening, momentum, nesterov"),
    ],
)
def test_a_state_of_another_rule_is_refused(saving: str, loading: str, message: str) -> None:
    _, saver = build(saving, "fp32", "fp32", placement_policy="cpu")
    saved = saver.state_dict()
    saver.engine.close()
    model, loader = build(loading, "fp32", "fp32", placement_policy="cpu")
    before = hetero.masters(model.parameters())
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(saved)
    assert all(map(torch.equal, before, hetero.masters(model.parameters())))
    loader.engine.close()


def test_a_state_of_a_parameter_that_is_frozen_now_is_refused() -> None:
    _, optimizer = build("adam", "fp32", "fp32", placement_policy="cpu")
    saved = optimizer.state_dict()
    optimizer.engine.close()
    model = net()
    model[2].weight.requires_grad_(False)
    model, optimizer = hetero.initialize(
        model, hetero.HybridAdam(model.parameters()), placement_policy="cpu", dtype="fp32"
    )
    with pytest.raises(ValueError, match=r"has 2\.weight, which was frozen"):
        optimizer.load_state_dict(saved)
    optimizer.engine.close()
