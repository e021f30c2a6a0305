"""hetero/api/optimizers: states in 8 bits, in every place, their bytes, checkpoints and loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from offload.memory.tiers import Account, Tier
from tests.support.training.loops import batches, tiny_gpt2, train


def build(state_dtype: str = "8bit", lr: float = 1e-2, **options: Any) -> Any:
    torch.manual_seed(0)
    with hetero.ZeroInitContext(dtype="bf16", **options):
        model = tiny_gpt2()
    optimizer = hetero.HybridAdam(model.parameters(), lr=lr, state_dtype=state_dtype)
    return hetero.initialize(model, optimizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"placement_policy": "auto", "host_memory": "500KiB"},
        {"placement_policy": "nvme", "host_memory": "400KiB", "overlap_updates": "both"},
        {"placement_policy": "nvme", "backend": "emulated", "device_memory": "700KiB"},
        {"placement_policy": "auto", "backend": "emulated", "device_memory": "8MiB"},
    ],
    ids=["auto", "overlapping", "emulated", "resident"],
)
def test_same_bits_in_every_place(settings: dict[str, Any], tmp_path: Path) -> None:
    wanted = train(*build(placement_policy="cpu"), batches(4), accumulate=1)
    found = train(*build(nvme_path=str(tmp_path), **settings), batches(4), accumulate=1)
    assert found.same_bits(wanted)


def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    """4 1/8 of 10 bytes an element, in whole pages a tile; on disk as in memory."""
    for options, tier in (
        ({"placement_policy": "cpu"}, Tier.HOST),
        ({"placement_policy": "nvme", "host_memory": "500KiB"}, Tier.DISK),
    ):
        _, optimizer = build(chunk_numel=32768, nvme_path=str(tmp_path), **options)
        engine = optimizer.engine
        slots = sum(chunk.slots for chunk in engine.layout.chunks)
        tile = 32768 * 2 + 2 * (32768 + 4 * 32768 // 64)
        used = engine.ledger.used(tier, Account.OPTIM_STATE)
        if tier is Tier.HOST:
            assert used == slots * tile
        group = engine.chunk_groups[0]
        assert group.dtypes.optim_state_bytes(32768) == tile == 33 * 4096
        assert tile <= 0.45 * 10 * 32768
        engine.close()


def test_states_of_other_dtypes_are_taken_in(tmp_path: Path) -> None:
    """Rounded to the nearest codes; what was in 8 bits comes back bit for bit."""
    data = batches(3)
    model, optimizer = build("fp32", placement_policy="cpu")
    for tokens in data:
        optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    optimizer.engine.close()

    _, other_optimizer = build(placement_policy="nvme", nvme_path=str(tmp_path))
    saved["param_groups"] = other_optimizer.state_dict()["param_groups"]
    other_optimizer.load_state_dict(saved)
    taken = other_optimizer.state_dict()
    for wanted, found in zip(saved["state"].values(), taken["state"].values(), strict=True):
        largest = wanted["exp_avg"].abs().max()
        assert (found["exp_avg"] - wanted["exp_avg"]).abs().max() <= largest / 16
        root, wanted_root = found["exp_avg_sq"].sqrt(), wanted["exp_avg_sq"].sqrt()
        assert (root - wanted_root).abs().max() <= wanted_root.max() / 32
        assert bool(((found["exp_avg_sq"] > 0) == (wanted["exp_avg_sq"] > 0)).all())
        # A master on a tie is moved by one unit, as there is no bit for the carry.
        units = found["master"].view(torch.int32) - wanted["master"].view(torch.int32)
        assert set(units.unique().tolist()) <= {0, 1}
    other_optimizer.load_state_dict(taken)
    again = other_optimizer.state_dict()
    for first, second in zip(taken["state"].values(), again["state"].values(), strict=True):
        for name, value in first.items():
            assert torch.equal(value, second[name])
    other_optimizer.engine.close()


def test_the_loss_is_that_of_states_in_fp32() -> None:
    """Within 1 % at the end of 60 steps over the same few batches, which overfit."""
    losses = {}
    for state_dtype in ("fp32", "8bit"):
        model, optimizer = build(state_dtype, lr=2e-3, placement_policy="cpu")
        found = train(model, optimizer, batches(6) * 10).losses
        losses[state_dtype] = sum(found[-6:]) / 6
        assert found[-1] < found[0]
    assert losses["8bit"] == pytest.approx(losses["fp32"], rel=0.01)
