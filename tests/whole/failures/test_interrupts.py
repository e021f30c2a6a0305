"""offload/interrupts: Ctrl-C anywhere leaves the whole effect or none, and training goes on."""

from __future__ import annotations

import gc
import linecache
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad_mode, profiler

import hetero
from offload import interrupts
from tests.support.training.loops import same
from tests.support.training.small_net import (
    EMULATED,
    SETTINGS,
    Net,
    Settings,
    assert_nothing_is_used,
    loss_of,
    managed,
    plain,
    train,
)

_HYPOTHESIS = f"{os.sep}hypothesis{os.sep}"
_WITHOUT_PLACES = (weakref.__file__, grad_mode.__file__, profiler.__file__)


class LineInterrupt:
    """Sends SIGINT to this process at place number `at` (from 1) of those that a call executes.

    A place is a line of Python code: hetero's, torch's, contextlib's. All lines of an uninterrupted
    function are one place, because the signal is delivered at its end, wherever it came. Hypothesis
    has none, because Python ignores what callbacks of the garbage collector raise, nor have three
    files: what callbacks of weak references raise is ignored, too, torch's own grad mode
    stays off if no_grad() is interrupted at its end, and torch functions stay off if a profiler's
    range is, which a signal, unlike this, cannot do. For the same reason a line that switches torch
    functions off is none: the end of that block is one call of a function in C.
    """

    def __init__(self, at: int = 0) -> None:
        """`at=0` counts the places."""
        self._at = at
        self._was_held_back = False
        self.places = 0
        self.where = ""  # where the signal was sent

    def run(self, function: Callable[[], object]) -> None:
        """Calls the function; raises KeyboardInterrupt where, or later than, the signal came."""
        sys.settrace(self._trace)
        try:
            function()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if file in _WITHOUT_PLACES or _HYPOTHESIS in file:
            return None
        if event == "line" and "DisableTorchFunction" not in _source(frame):
            held_back = interrupts._block.depth > 0
            self.places += not (held_back and self._was_held_back)
            self._was_held_back = held_back
            if self.places == self._at and not self.where:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._trace


def _source(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


@contextmanager
def interrupt_in(owner: object, method: str, done: bool = True) -> Iterator[None]:
    """The block is ended by Ctrl-C in the owner's method: when all is `done`, or before."""
    call = getattr(owner, method)

    def interrupt(*args: Any, **more: Any) -> None:
        if done:
            call(*args, **more)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


pytestmark = pytest.mark.usefixtures("nothing_left", "ctrl_c")

OVERLAPPED = [
    pytest.param(
        {"placement_policy": "nvme", "host_memory": "1MiB", "debug": {"overlap_updates": overlap}},
        id=overlap,
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


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_was_accumulated_stays_if_backward_is_interrupted(
    settings: Settings, tmp_path: Path
) -> None:
    """As torch keeps it: Ctrl-C comes when a parameter's gradient is about to be added."""
    model, optimizer = managed(settings, tmp_path)
    loss_of(model).backward()
    loss = loss_of(model, 2)
    check = optimizer.engine.steps.grad_intake.check

    def interrupted(*arguments: Any) -> None:
        check(*arguments)
        signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer.engine.steps.grad_intake, "check", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    wanted, _ = plain()
    loss_of(wanted).backward()
    for param, torch_s in zip(model.parameters(), wanted.parameters(), strict=True):
        assert (param.grad is None) == (torch_s.grad is None)
        if torch_s.grad is not None:
            torch.testing.assert_close(param.grad.clone(), torch_s.grad)
    optimizer.engine.close()


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
    """10 for each policy, from another thread."""
    training = Training(settings, tmp_path)
    training.go_on()
    generator = random.Random(0)
    for _ in range(10):
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
    with interrupt_in(optimizer.engine.steps.schedule, "step"):
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
