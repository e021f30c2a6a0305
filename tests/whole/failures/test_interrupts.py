"""offload/interrupts: Ctrl-C anywhere leaves the whole effect or none, and training goes on."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from tests.support.ranks.interrupts import interrupt_in
from tests.support.training.line_interrupts import LineInterrupt
from tests.support.training.small_net import (
    EMULATED,
    SETTINGS,
    Net,
    Settings,
    assert_nothing_is_used,
    loss_of,
    managed,
    train,
)

pytestmark = pytest.mark.usefixtures("nothing_left", "ctrl_c")

OVERLAPPED = [
    pytest.param(
        {"placement_policy": "nvme", "host_memory": "1MiB", "overlap_updates": overlap}, id=overlap
    )
    for overlap in ("forward", "both")
]


class Training:
    """A training that is interrupted again and again, beside one that is not."""

    def __init__(self, settings: Settings, path: Path) -> None:
        self.model, self.optimizer = managed(settings, path)
        self._plain_model, self._plain = managed({"placement_policy": "cpu"}, path)
        self._wanted = [masters(self._plain_model)]
        self.steps = 0

    def wanted(self, steps: int) -> list[torch.Tensor]:
        """The masters after so many steps."""
        while len(self._wanted) <= steps:
            train(self._plain_model, self._plain, len(self._wanted))
            self._wanted.append(masters(self._plain_model))
        return self._wanted[steps]

    def forward(self) -> torch.Tensor:
        """Of the next step."""
        return loss_of(self.model, self.steps + 1)

    def whole_step(self) -> None:
        """The next step, from the beginning."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()
        self.steps += 1

    def go_on(self) -> None:
        """After an interruption: the step was made, or not; and the next one is right."""
        self.optimizer.zero_grad()
        found = masters(self.model)
        if not same(found, self.wanted(self.steps)):
            self.steps += 1
            assert same(found, self.wanted(self.steps)), "the step is neither made nor not made"
        self.whole_step()
        self.optimizer.zero_grad()
        assert same(masters(self.model), self.wanted(self.steps)), "the next step is wrong"
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None

    def close(self) -> None:
        assert_nothing_is_used(self.optimizer)
        self.optimizer.engine.close()
        self._plain.engine.close()


def masters(model: Net) -> list[torch.Tensor]:
    return hetero.masters(model.parameters())


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, wanted))


# Each prepares a part of a training and returns what is to be interrupted.


def forward(training: Training) -> Callable[[], object]:
    return training.forward


def backward(training: Training) -> Callable[[], object]:
    return training.forward().backward


def step(training: Training) -> Callable[[], object]:
    training.forward().backward()
    return training.optimizer.step


def gather(training: Training) -> Callable[[], object]:
    def gather() -> None:
        with hetero.gathered(list(training.model.last.parameters())):
            training.model.last.weight.sum()

    return gather


def use(training: Training) -> Callable[[], object]:
    return lambda: [p.square().sum() for p in training.model.parameters()]


def save(training: Training) -> Callable[[], object]:
    return lambda: (training.model.state_dict(), training.optimizer.state_dict())


def load(training: Training) -> Callable[[], object]:
    model, optimizer = training.model, training.optimizer
    states = model.state_dict(), optimizer.state_dict()
    return lambda: (model.load_state_dict(states[0]), optimizer.load_state_dict(states[1]))


def clip(training: Training) -> Callable[[], object]:
    """Of gradients, after which these are cleared."""
    training.forward().backward()
    return lambda: nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)


PHASES = [forward, backward, step, gather, use, save, load, clip]


@pytest.mark.covering(1)
@pytest.mark.parametrize("every", [101, pytest.param(1, marks=pytest.mark.extra)])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("settings", [*SETTINGS, EMULATED, *OVERLAPPED])
def test_at_any_line(
    settings: Settings,
    phase: Callable[[Training], Callable[[], object]],
    every: int,
    tmp_path: Path,
) -> None:
    training = Training(settings, tmp_path)
    training.go_on()
    at, last = 1, False
    while not last:
        call = phase(training)
        interruption = LineInterrupt(at)
        interrupted = False
        try:
            interruption.run(call)
        except KeyboardInterrupt:
            interrupted = True
        last = not interruption.where
        assert interrupted is not last
        del call
        if phase in (load, clip):  # torch's own no_grad() in it may be interrupted at its end
            torch.set_grad_enabled(True)
        try:
            training.go_on()
        except Exception as error:
            raise AssertionError(f"after an interruption at {interruption.where}") from error
        at += every
    training.close()


@pytest.fixture
def signals() -> Iterator[Callable[[float], None]]:
    """Sends SIGINT to this process after so many seconds."""
    timers: list[threading.Timer] = []

    def send(after_s: float) -> None:
        timers.append(threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    yield send
    for timer in timers:
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("settings", [*SETTINGS, EMULATED, *OVERLAPPED])
def test_signals_at_any_time(
    settings: Settings, signals: Callable[[float], None], tmp_path: Path
) -> None:
    """40 for each policy, from another thread."""
    training = Training(settings, tmp_path)
    training.go_on()
    generator = random.Random(0)
    for _ in range(40):
        try:
            signals(generator.uniform(0, 0.02))
            while True:
                training.whole_step()
                masters(training.model)
        except KeyboardInterrupt:
            pass
        training.go_on()
    training.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [*SETTINGS, EMULATED])
@pytest.mark.parametrize("closes", [True, False])
def test_a_model_is_dropped_after_an_interruption(
    closes: bool, settings: Settings, tmp_path: Path
) -> None:
    """Threads, files and torch's hooks go with it (`nothing_left`), and others train."""
    for at in range(1, 400, 97):
        model, optimizer = managed(settings, tmp_path)
        interruption = LineInterrupt(at)
        with pytest.raises(KeyboardInterrupt):
            interruption.run(lambda model=model: loss_of(model))
        if closes:
            optimizer.engine.close()
        del model, optimizer
        gc.collect()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        plain = nn.Linear(4, 4)
        plain(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_step_that_was_ended_in_the_middle_says_so(settings: Settings, tmp_path: Path) -> None:
    """By a second Ctrl-C: nobody knows which weights have moved."""
    model, optimizer = managed(settings, tmp_path)
    train(model, optimizer)
    state = model.state_dict()
    loss_of(model).backward()
    with interrupt_in(optimizer.engine.schedule, "step"):
        optimizer.step()
    for use in (
        optimizer.step,
        lambda: loss_of(model),
        model.state_dict,
        optimizer.state_dict,
        lambda: model.load_state_dict(state),
        lambda: hetero.masters(model.parameters()),
        lambda: hetero.grads(model.parameters()),
        optimizer.engine.synchronize,
        lambda: hetero.gathered(model.last.weight).__enter__(),
    ):
        with pytest.raises(
            hetero.HeteroError, match=r"in the middle of .*load the last checkpoint"
        ):
            use()
    optimizer.engine.close()
    other, others = managed(settings, tmp_path)
    train(other, others)
    others.engine.close()
