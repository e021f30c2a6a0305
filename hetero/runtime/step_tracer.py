"""Measures what each step computes, and the memory that it has beside the model state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._compile import _disable_dynamo

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.planning.step_cost import Computing, Phase
from hetero.runtime.modules.module_hooks import ModelHook
from offload.errors import ClosedError

_MOST_OUTPUTS = 8  # of a forward, that are watched for the begin of backward
_MOST_EVALUATIONS = 2  # forwards without gradients between two steps whose memory is looked at


@dataclass(frozen=True)
class MeasuredStep:
    """One step.

    Attributes:
        micro_batches: forwards of the whole model with gradients.
        computing: seconds of forward and backward without waits for transfers.
        peak_host_bytes: the most RAM beside model state.
        peak_device_bytes: the same on a DEVICE with memory of its own.
    """

    micro_batches: int
    computing: Computing
    peak_host_bytes: int
    peak_device_bytes: int


@dataclass
class StepClock:
    """Adds up the seconds of a step's phases, and keeps its peaks of memory.

    Attributes:
        memory: bytes beside the model state now, (in RAM, on DEVICE).
        waits_s: seconds for which compute has waited for transfers so far; no computing.
        clock: seconds.
        listeners: are told of each phase that begins (None: what was before has ended, and none
            does), with what `memory` tells then.
    """

    memory: Callable[[], tuple[int, int]]
    waits_s: Callable[[], float]
    clock: Callable[[], float] = time.perf_counter
    listeners: list[Callable[[Phase | None, tuple[int, int]], None]] = field(default_factory=list)
    _phase: Phase | None = None
    _began_s: float = 0.0
    _seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    _micro_batches: int = 0
    _peak: tuple[int, int] = (0, 0)

    def begin(self, phase: Phase | None) -> None:
        """A phase begins, and the one before it ends; None: neither, as between micro-batches."""
        now_s = self.clock() - self.waits_s()
        if self._phase is not None:
            self._seconds[self._phase] += max(0.0, now_s - self._began_s)
        self._micro_batches += phase is Phase.FORWARD
        self._phase, self._began_s = phase, now_s
        host, device = self.memory()
        self._peak = max(self._peak[0], host), max(self._peak[1], device)
        for listener in self.listeners:
            listener(phase, (host, device))

    def end_step(self) -> MeasuredStep | None:
        """The step that was made, and begins the next; None if it had no forward."""
        self.begin(None)
        made = None
        if self._micro_batches:
            computing = Computing(self._seconds[Phase.FORWARD], self._seconds[Phase.BACKWARD])
            made = MeasuredStep(self._micro_batches, computing, *self._peak)
        self.reset()
        return made

    def reset(self) -> None:
        """Forgets what came since the last step's end."""
        self._phase, self._micro_batches, self._peak = None, 0, (0, 0)
        self._seconds = dict.fromkeys(Phase, 0.0)


class StepTracer:
    """Tells a StepClock when forward and backward of the whole model begin and end.

    It has hooks on the model and on what that returns: a backward begins with the first gradient of
    an output or of a parameter, and ends when autograd says so. Of forwards without gradients only
    the memory is looked at. The seconds of the first step include what is done only once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        chunk_groups: Sequence[ChunkGroup],
        memory: Callable[[], tuple[int, int]],
        note_forward: Callable[[bool], object],
        hooks: ExitStack,
    ) -> None:
        """Puts hooks on the model, which `hooks` takes off; more `chunk_groups` may come.

        `memory` tells the bytes beside the model state now, (in RAM, on DEVICE), in some 20 us.
        `note_forward` is told when a forward with gradients begins (True) and ends (False).
        """
        self.latest: MeasuredStep | None = None
        self.step_clock = StepClock(memory, lambda: sum(group.wait_s for group in chunk_groups))
        self._memory = memory
        self._note_forward = note_forward
        self._depth = 0
        self._with_grad = False  # the forward at hand
        self._in_backward = False
        self._evaluations = 0  # since the last step
        self._evaluation_bytes = 0  # the most RAM beside model state after one
        self._closed = False
        hooks.callback(self._close)
        hooks.callback(model.register_forward_pre_hook(ModelHook(self._before)).remove)
        hooks.callback(model.register_forward_hook(ModelHook(self._after), always_call=True).remove)

    def _close(self) -> None:
        self._closed = True

    @_disable_dynamo
    def _before(self, module: torch.nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._in_backward = False
            self._with_grad = torch.is_grad_enabled()
            self._note_forward(self._with_grad)
            if self._with_grad:
                self.step_clock.begin(Phase.FORWARD)

    @_disable_dynamo
    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        self._note_forward(False)
        if self._with_grad:
            self.step_clock.begin(None)
            for tensor in _tensors(output)[:_MOST_OUTPUTS]:
                tensor.register_hook(lambda _: self.gradient())
        elif self._evaluations < _MOST_EVALUATIONS:
            self._evaluations += 1
            self._evaluation_bytes = max(self._evaluation_bytes, self._memory()[0])

    def gradient(self) -> None:
        """A gradient is there: a backward goes on. Raises ClosedError after engine.close()."""
        if self._closed:
            raise ClosedError(
                "backward after engine.close(): the parameters that it needs have no values; call "
                "backward before"
            )
        if not self._in_backward and torch._C._current_graph_task_id() != -1:
            self._in_backward = True
            self.step_clock.begin(Phase.BACKWARD)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self.step_clock.begin(None)

    def end_step(self) -> tuple[int, int]:
        """The step is `latest` now, unless it had no forward of the whole model.

        Returns the most bytes beside the model state (in RAM, on DEVICE) since the last step.
        """
        made = self.step_clock.end_step()
        host_bytes, self._evaluation_bytes = self._evaluation_bytes, 0
        self._in_backward = False
        self._depth = 0  # a forward that Ctrl-C ended has not said so
        self._evaluations = 0
        if made is None:
            return host_bytes, 0
        self.latest = made
        return max(host_bytes, made.peak_host_bytes), made.peak_device_bytes

    def forget(self) -> None:
        """The step is left out."""
        self.step_clock.reset()
        self._in_backward = False


def _tensors(output: Any) -> list[torch.Tensor]:
    """Tensors in what a model returned from which a backward can begin."""
    if isinstance(output, dict):
        output = list(output.values())
    elif not isinstance(output, (torch.Tensor, list, tuple)):
        output = list(vars(output).values()) if hasattr(output, "__dict__") else []
    parts = output if isinstance(output, (list, tuple)) else [output]
    nested = [part if isinstance(part, (list, tuple)) else [part] for part in parts]
    tensors = (tensor for part in nested for tensor in part if isinstance(tensor, torch.Tensor))
    return [tensor for tensor in tensors if tensor.grad_fn is not None]
