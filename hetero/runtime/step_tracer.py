"""Records the traces of an engine's steps; those of different kinds of steps side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.planning.trace import Phase, Trace, TraceRecorder, Use

_MOST_TRACES = 8
_MOST_OUTPUTS = 8  # of a forward, that are watched for the begin of backward
_MOST_MOMENTS = 4096  # of one step: where none is ever made, what was recorded is given up
_MOST_APART = 2  # forwards without gradients that are looked at, of those between two steps

Key = tuple[int, tuple[Use, ...]]


class Traces:
    """The latest trace of each sequence of uses: training, evaluation, another part of the model.

    The latest of all is the last; of many the oldest are forgotten.
    """

    def __init__(self) -> None:
        """No trace is known."""
        self._seen: dict[Key, Trace] = {}

    def note(self, trace: Trace) -> None:
        """A step had this trace."""
        key = (trace.micro_batches, trace.uses)
        self._seen.pop(key, None)
        self._seen[key] = trace
        while len(self._seen) > _MOST_TRACES:
            del self._seen[next(iter(self._seen))]

    def __iter__(self) -> Iterator[Trace]:
        return iter(list(self._seen.values()))

    def __len__(self) -> int:
        return len(self._seen)


class StepTracer:
    """Tells a TraceRecorder when forward and backward of the whole model begin and end.

    It has hooks on the model and on what that returns: a backward begins with the first gradient of
    an output or of a parameter, and ends when autograd says so. A forward without gradients is a
    trace of its own, and no part of the step's. Uses outside of both are in no trace. The seconds
    of the first step include what is done only once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        chunk_groups: Sequence[ChunkGroup],
        memory: Callable[[], tuple[int, int]],
    ) -> None:
        """Puts hooks on the model.

        Args:
            model: whose steps are traced.
            chunk_groups: of its parameters; more of them may come.
            memory: bytes beside the model state now, (in RAM, on DEVICE).
        """
        self.traces = Traces()
        self._chunk_groups = chunk_groups
        self._memory = memory
        self._recorder = self._new_recorder()
        self._depth = 0
        self._with_grad = False  # the forward at hand
        self._in_backward = False
        self._apart: list[int] | None = None  # uses before the forward without gradients at hand
        self._apart_seen = 0  # since the last step
        self._apart_bytes = 0  # the most beside model state after one
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def _new_recorder(self) -> TraceRecorder:
        orders = [chunk_group.order for chunk_group in self._chunk_groups]
        return TraceRecorder(orders, self._memory, self._waits_s)

    def _waits_s(self) -> float:
        return sum(chunk_group.wait_s for chunk_group in self._chunk_groups)

    @_disable_dynamo
    def _before(self, module: torch.nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._in_backward = False
            if self._recorder.moments >= _MOST_MOMENTS:
                self._recorder.reset()
            self._with_grad = torch.is_grad_enabled()
            if self._with_grad:
                self._recorder.begin(Phase.FORWARD)
            elif self._apart_seen < _MOST_APART:
                self._apart = [chunk_group.order.recorded for chunk_group in self._chunk_groups]

    @_disable_dynamo
    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        if self._with_grad:
            self._recorder.begin(None)
            for tensor in _tensors(output)[:_MOST_OUTPUTS]:
                tensor.register_hook(self._begin_backward)
        elif self._apart is not None:
            self._note_apart(self._apart)
            self._apart = None

    def _note_apart(self, before: list[int]) -> None:
        uses = [
            Use(number, chunk, Phase.FORWARD)
            for number, (chunk_group, first) in enumerate(
                zip(self._chunk_groups, before, strict=False)
            )
            for chunk in chunk_group.order.recording()[first:]
        ]
        self._apart_seen += 1
        self._apart_bytes = max(self._apart_bytes, self._memory()[0])
        self.traces.note(Trace(tuple(uses), 0, 0.0, 0.0))

    def _begin_backward(self, grad: torch.Tensor) -> None:
        self.gradient()

    def gradient(self) -> None:
        """A gradient is there: a backward goes on."""
        if not self._in_backward and torch._C._current_graph_task_id() != -1:
            self._in_backward = True
            self._recorder.begin(Phase.BACKWARD)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self._recorder.begin(None)

    def take_beside_bytes(self) -> int:
        """The most RAM beside model state after forwards without gradients since the last call."""
        found, self._apart_bytes = self._apart_bytes, 0
        return found

    def end_step(self) -> Trace | None:
        """The step's trace, which is noted; None if it had no forward of the whole model.

        Call it before the orders' end_step().
        """
        whole = self._recorder.has(Phase.FORWARD)
        trace = self._recorder.end_step()
        self._in_backward = False
        self._depth = 0  # a forward that Ctrl-C ended has not said so
        self._apart_seen = 0
        if len(self._recorder.orders) < len(self._chunk_groups):
            # Chunk groups have come, of which the recorder knows nothing.
            self._recorder = self._new_recorder()
        if trace is None or not whole:
            return None
        self.traces.note(trace)
        return trace

    def forget(self) -> None:
        """The step is left out: what was recorded of it refers to recordings that end now."""
        self._recorder.reset()
        self._in_backward = False

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _tensors(output: Any) -> list[torch.Tensor]:
    """Tensors in what a model returned from which a backward can begin."""
    if isinstance(output, torch.Tensor):
        return [output] if output.grad_fn is not None else []
    if isinstance(output, dict):
        output = list(output.values())
    elif not isinstance(output, (list, tuple)):
        output = list(vars(output).values()) if hasattr(output, "__dict__") else []
    return [tensor for part in output if part is not None for tensor in _shallow(part)]


def _shallow(part: Any) -> list[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        return [part] if part.grad_fn is not None else []
    if isinstance(part, (list, tuple)):
        return [p for p in part if isinstance(p, torch.Tensor) and p.grad_fn is not None]
    return []
