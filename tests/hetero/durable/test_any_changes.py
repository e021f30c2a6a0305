"""Whatever changes the state between commits, what the last commit has stays as it was."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn

import hetero
from hetero.checkpoint.manifest import master_key, state_key
from hetero.durable.stored_commit import open_stored
from tests.support.checkpoint.small_trainings import (
    ALL_PLACES,
    PLACES,
    build,
    steps,
    whole,
)
from tests.support.training.loops import same

_BUDGETS = ("96KiB", "200KiB", "1MiB")  # the first one for parameters on NVMe


class AnyChanges(RuleBasedStateMachine):
    """Steps, writes, loads, moves and commits in any order; a crash may come after each."""

    place = "disk"

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.options = {**ALL_PLACES[self.place], "durable": True, "commit_every": 0}
        scratch = self.folder / "scratch"
        scratch.mkdir()
        self.model, self.optimizer = build(self.options, scratch)
        self.kept: list[torch.Tensor] | None = None
        self.values: dict[str, torch.Tensor] = {}  # of `kept`
        self.made = 0
        self.commit(blocking=True)  # so that the first change may be of what a commit has

    def teardown(self) -> None:
        """A start from what a crash would leave now has what was committed last."""
        copy = self.folder / "copy"
        shutil.copytree(self.folder / "scratch", copy)
        self.optimizer.engine.close()
        if self.kept is not None:
            options: dict[str, Any] = {**PLACES["cpu"], "durable": True, "commit_every": 0}
            model, optimizer = build(options, copy, seed=7)
            assert same(whole(model, optimizer), self.kept)
            optimizer.engine.close()
        shutil.rmtree(self.folder)

    @rule(parts=st.booleans())
    def step(self, parts: bool) -> None:
        """Of all parameters, or of some alone."""
        if parts:
            self.optimizer.backward(self.model.first.weight.float().square().sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            steps(self.model, self.optimizer, range(self.made, self.made + 1))
        self.made += 1
        self.looked_at = False

    @rule(value=st.integers(-4, 4))
    def write(self, value: int) -> None:
        with hetero.gathered(self.model.last.weight, modifier_rank=0), torch.no_grad():
            self.model.last.weight[0] = value
        self.looked_at = False

    @rule(value=st.integers(-4, 4))
    def load_state_dict(self, value: int) -> None:
        state = {name: torch.full_like(p, value) for name, p in self.model.state_dict().items()}
        self.model.load_state_dict(state)
        self.looked_at = False

    @rule(budget=st.sampled_from(_BUDGETS))
    def move(self, budget: str) -> None:
        try:
            self.optimizer.engine.set_budget(budget)
        except hetero.BudgetError:
            return
        self.looked_at = False

    @rule(blocking=st.booleans())
    def commit(self, blocking: bool) -> None:
        self.kept = None  # (while it is under way either may be found)
        commit = hetero.commit(self.model, blocking=blocking)
        self.kept = whole(self.model, self.optimizer)
        self.values = values_by_key(self.model, self.optimizer)
        commit.wait()
        self.looked_at = False

    @invariant()
    def is_kept(self) -> None:
        """What the last commit has is as it was then."""
        if self.looked_at or self.kept is None:
            return
        self.looked_at = True
        with open_stored(self.folder / "scratch") as stored:
            order = [(key, 0, value.numel()) for key, value in self.values.items()]
            for key, _, found in stored.values([order]):
                assert torch.equal(found, self.values[key].reshape(-1)), key


def values_by_key(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Masters and states as a stored checkpoint names them."""
    found = {}
    states = optimizer.state_dict()["state"].values()
    for (name, _), state in zip(model.named_parameters(), states, strict=True):
        found[master_key(name)] = state["master"]
        found |= {state_key(name, each): state[each] for each in ("exp_avg", "exp_avg_sq")}
    return found


@pytest.mark.parametrize("place", [name for name in ALL_PLACES if name != "large chunks"])
@pytest.mark.usefixtures("fake_cuda_of_place")
def test_any_changes(place: str) -> None:
    machine = type("AnyChangesThere", (AnyChanges,), {"place": place})
    machine.TestCase.settings = settings(
        max_examples=4,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase().runTest()
