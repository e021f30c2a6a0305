"""hetero/api/optimizers: states in 8 bits, in every place, of other dtypes, and their loss.

test_optimizers.py has their rules and bytes, test_save_load.py their checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoint.small_trainings import PLACES, build, steps, whole
from tests.support.training.loops import same
from tests.support.training.small_net import loss_of

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.usefixtures("fake_cuda")
def test_same_bits_in_every_place(tmp_path: Path) -> None:
    found = []
    for settings in PLACES.values():
        model, optimizer = build(settings, tmp_path, state_dtype="8bit")
        steps(model, optimizer, range(3))
        found.append(whole(model, optimizer))
        optimizer.engine.close()
    assert all(same(each, found[0]) for each in found)


def test_states_of_other_dtypes_are_taken_in(tmp_path: Path) -> None:
    """Rounded to the nearest codes; what was in 8 bits comes back bit for bit."""
    model, optimizer = build(PLACES["cpu"], tmp_path)
    steps(model, optimizer, range(3))
    saved = optimizer.state_dict()
    optimizer.engine.close()

    _, other_optimizer = build(PLACES["disk"], tmp_path, state_dtype="8bit")
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


def test_the_loss_is_that_of_states_in_fp32(tmp_path: Path) -> None:
    """Within 1 % at the end of 60 steps over the same few batches, which overfit."""
    losses = {}
    for state_dtype in ("fp32", "8bit"):
        model, optimizer = build(PLACES["cpu"], tmp_path, state_dtype=state_dtype)
        before = sum(loss_of(model, seed).item() for seed in range(6))
        for _ in range(10):
            steps(model, optimizer, range(6))
        losses[state_dtype] = sum(loss_of(model, seed).item() for seed in range(6))
        assert losses[state_dtype] < before / 2
        optimizer.engine.close()
    assert losses["8bit"] == pytest.approx(losses["fp32"], rel=0.01)
