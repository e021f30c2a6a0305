"""Follows each step: what it computes, its memory beside the model state, and the rates of its
transfers and updates. So the next one is predicted, and what limits it named, without `hetero
profile`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch._compile import _disable_dynamo

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.chunk_group import ChunkGroup, Shared
from hetero.overlap import OverlapUpdates
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.network import Network
from hetero.planning.profiles import saved_profile
from hetero.planning.report import explain, explain_bytes, gains
from hetero.planning.step_cost import Computing, Phase, Plan, Work, predict
from hetero.runtime.modules.module_hooks import ModelHook
from hetero.runtime.recompute.recompute import BlockCalls
from hetero.runtime.relocation import BudgetMoves
from offload.device.backend import Backend
from offload.errors import ClosedError
from offload.memory.tiers import Tier
from offload.profile.machine_profile import Profile, Rates

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
        hooks.callback(setattr, self, "_closed", True)
        hooks.callback(model.register_forward_pre_hook(ModelHook(self._before)).remove)
        hooks.callback(model.register_forward_hook(ModelHook(self._after), always_call=True).remove)

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


_STEPS = 8  # the last ones that are looked at: a disk's speed changes within minutes


@dataclass(frozen=True)
class Counters:
    """Bytes that were moved and updated, and the seconds for which something was."""

    nvme_bytes: float = 0.0
    nvme_s: float = 0.0
    h2d_bytes: float = 0.0
    h2d_s: float = 0.0
    d2h_bytes: float = 0.0
    d2h_s: float = 0.0
    update_bytes: float = 0.0  # on the CPU, as UpdateKind.bytes_moved counts them
    update_s: float = 0.0

    def since(self, earlier: Counters, steps: int = 1) -> Counters:
        """What came after `earlier`, per step."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Counters(*[(now - before) / steps for now, before in pairs])


def io_stats(
    chunk_groups: Sequence[ChunkGroup], activations: ActivationStore | None
) -> dict[str, float]:
    """What all I/O engines together have counted so far: read_bytes, written_bytes, busy_s."""
    engines: list[Mapping[str, Any]] = [g.disk.io.stats for g in chunk_groups if g.disk is not None]
    if activations is not None:
        engines.append(activations.own_io_stats)
    names = ("read_bytes", "written_bytes", "busy_s")
    return {name: sum(stats.get(name, 0) for stats in engines) for name in names}


def counters_of(
    chunk_groups: Sequence[ChunkGroup],
    backend: Backend,
    activations: ActivationStore | None = None,
) -> Counters:
    """What disks, pipelines and link have counted so far."""
    update_bytes = update_s = 0.0
    io = io_stats(chunk_groups, activations)
    for chunk_group in chunk_groups:
        updated = chunk_group.pipeline.stats
        update_bytes += updated["tasks"] * chunk_group.task_bytes
        update_s += updated["compute_s"]
    counters = Counters(
        nvme_bytes=io["read_bytes"] + io["written_bytes"],
        nvme_s=io["busy_s"],
        update_bytes=update_bytes,
        update_s=update_s,
    )
    if not backend.separate:
        return counters
    h2d_s, d2h_s = backend.link_busy_s
    h2d_bytes, d2h_bytes = backend.h2d_bytes, backend.d2h_bytes
    return replace(counters, h2d_bytes=h2d_bytes, h2d_s=h2d_s, d2h_bytes=d2h_bytes, d2h_s=d2h_s)


class LearnedRates:
    """Means over the last steps of a training."""

    def __init__(
        self, counters: Callable[[], Counters], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`counters` says what was counted so far, `clock` the seconds."""
        self._counters = counters
        self._clock = clock
        # What was counted at the ends of steps. The first step after each start does things that no
        # other does, so it counts from its end on.
        self._ends: deque[tuple[Counters, float]] = deque(maxlen=_STEPS + 1)

    def restart(self) -> None:
        """Forgets all: homes have moved, which counts as no step and makes counters begin anew."""
        self._ends.clear()

    def end_step(self) -> None:
        """A step is over."""
        self._ends.append((self._counters(), self._clock()))

    @property
    def steps(self) -> int:
        """How many steps the means are of."""
        return max(0, len(self._ends) - 1)

    @property
    def step_s(self) -> float:
        """Seconds of a step; 0 before there was one."""
        return (self._ends[-1][1] - self._ends[0][1]) / self.steps if self.steps else 0.0

    @property
    def per_step(self) -> Counters:
        """Bytes and seconds of a step; all 0 before there was one."""
        if not self.steps:
            return Counters()
        return self._ends[-1][0].since(self._ends[0][0], self.steps)

    def rates(self, dtypes: Sequence[str], separate: bool) -> Rates | None:
        """What predictions take in the place of a profile; None if a rate is not known yet.

        A disk has one rate, that of its reads and writes as they were mixed, queues that ran dry
        included; updates have one for all `dtypes`, also on a DEVICE that is emulated. `separate`:
        DEVICE has memory of its own.
        """
        seen = self.per_step
        if not (seen.update_bytes and seen.update_s):
            return None
        if separate and not (seen.h2d_bytes and seen.h2d_s and seen.d2h_bytes and seen.d2h_s):
            return None
        update = seen.update_bytes / seen.update_s
        nvme = seen.nvme_bytes / seen.nvme_s if seen.nvme_bytes and seen.nvme_s else None
        return Rates(
            name="this training's own rates",
            dram_bytes_per_s=update,
            nvme_read_bytes_per_s=nvme,
            nvme_write_bytes_per_s=nvme,
            nvme_mixed_bytes_per_s=nvme,
            h2d_bytes_per_s=seen.h2d_bytes / seen.h2d_s if separate else None,
            d2h_bytes_per_s=seen.d2h_bytes / seen.d2h_s if separate else None,
            update_bytes_per_s=dict.fromkeys(dtypes, update),
            device_update_bytes_per_s=dict.fromkeys(dtypes, update) if separate else None,
        )


# Tokens of a step, as long as none was measured: `hetero train`'s 8 sequences of 128.
EXPECTED_TOKENS = 1024

_FEWEST_STEPS = 3  # from which rates are learned before the user is told of a limit
_DISK_SHARE = 0.5  # of the step: less is no limit worth a note
_SHORT_STEP_S = 0.1  # nobody waits for a step that is shorter


class StepPredictions:
    """Predicts steps by the saved profile of the machine, or by the training's own rates."""

    def __init__(
        self,
        chunk_groups: Sequence[ChunkGroup],
        shared: Shared,
        group_plans: Callable[[], Sequence[ChunkGroupPlan]],
        tracer: StepTracer,
        speculates: Callable[[], bool],
        activations: ActivationStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Predicts steps of `chunk_groups`, of which more may come.

        `group_plans` gives them as they are placed now, `tracer` the latest step, and `speculates`
        says whether updates are made during backward; `activations` may have an I/O engine of their
        own.
        """
        self._shared = shared
        self._world = chunk_groups[0].world
        self._group_plans = group_plans
        self._tracer, self._speculates = tracer, speculates
        backend = shared.backend
        self.learned = LearnedRates(lambda: counters_of(chunk_groups, backend, activations), clock)
        self._has_noted = False

    def plans(self) -> list[Plan]:
        """Each chunk group's placement with the step that is predicted for it, main one first.

        Empty if neither a saved profile nor steps say how fast anything is.
        """
        groups = self._group_plans()
        saved = saved_profile(self._shared.config, self._world.local_ranks)
        dtypes = sorted({group.dtypes.compute for group in groups})
        rates = saved or self.learned.rates(dtypes, self._shared.backend.separate)
        if rates is None:
            return []
        try:
            return self._plans(groups, rates)
        except ValueError:  # the profile says nothing about what is used
            return []

    def explain(self) -> str:
        """The table of bytes, seconds and limits, for people."""
        plans = self.plans()
        if not plans:
            limits = {tier: self._shared.ledger.budget_bytes[tier.value] for tier in Tier}
            return (
                f"{explain_bytes(self._group_plans(), limits)}\n\nNo step time is expected: there "
                f"is no profile of this machine (hetero profile) that says what is used here, and "
                f"no steps yet from which to learn rates."
            )
        plan = plans[0]
        by = f"the profile {plan.profile.name}"
        if not isinstance(plan.profile, Profile):
            by = f"the rates of this training's last {self.learned.steps} steps"
        assumed = ""
        if plan.computing.expected:
            assumed = f", for {EXPECTED_TOKENS} tokens per step until one was made"
        return f"{explain(plans)}\nSeconds are expected by {by}{assumed}."

    def end_step(self) -> None:
        """A step is over. Says once in the engine's notes if the disk is what it waits for."""
        self.learned.end_step()
        if not self._has_noted and self.learned.steps >= _FEWEST_STEPS:
            self._note_limit()

    def _note_limit(self) -> None:
        seen, step_s = self.learned.per_step, self.learned.step_s
        made = self._tracer.latest
        if made is None or step_s < _SHORT_STEP_S:
            return
        computing_s = made.computing.forward_s + made.computing.backward_s
        others_s = max(computing_s, seen.update_s)
        if seen.nvme_s < max(_DISK_SHARE * step_s, others_s):
            return
        self._has_noted = True
        note = f"the disk is the limit: {seen.nvme_s:.2g} s of {step_s:.2g} s per step"
        plans = self.plans()
        saved_s = gains(plans).get("RAM", 0.0) if plans else 0.0
        if saved_s > 0:
            note += f"; one more GiB of host_memory is predicted to save {saved_s:.2g} s"
        self._shared.notes.append(f"{note} (engine.explain() has the figures)")

    def _plans(self, groups: Sequence[ChunkGroupPlan], rates: Rates) -> list[Plan]:
        made, network = self._tracer.latest, None
        if isinstance(rates, Profile):
            several_machines = self._world.is_on_several_machines
            sent_per_s = rates.node_bytes_per_s if several_machines else rates.rank_bytes_per_s
            if sent_per_s is not None:
                network = Network(nodes=self._world.size, node_bytes_per_s=sent_per_s)
        elif made is None:
            return []
        config = self._shared.config
        overlap = config.debugging.overlap_updates
        if overlap is OverlapUpdates.AUTO and not self._speculates():
            overlap = OverlapUpdates.FORWARD
        return predict(
            groups,
            rates,
            Work(EXPECTED_TOKENS) if made is None else Work(0, made.micro_batches),
            None if made is None else made.computing,
            prefetch=config.debugging.prefetch,
            overlap=overlap,
            network=network,
        )


class StepWatch:
    """Looks at each step that was made: its seconds, its rates and its memory; homes may move.

    Attributes:
        tracer: follows forwards and backwards.
        predictions, budget_moves: learn from steps what to expect of the next ones.
        block_calls: of the blocks that may be computed again in backward, if there are some.
        activations: what autograd saves, if that is not left to it.
        listeners: are called when a step was made, to its end.
    """

    def __init__(
        self,
        tracer: StepTracer,
        predictions: StepPredictions,
        block_calls: BlockCalls | None,
        budget_moves: BudgetMoves,
        activations: ActivationStore | None,
    ) -> None:
        self.tracer, self.predictions = tracer, predictions
        self.block_calls, self.budget_moves = block_calls, budget_moves
        self.activations = activations
        self.listeners: list[Callable[[], None]] = []

    def words(self) -> str:
        """For people: which blocks are computed again, and why; "" if none may be."""
        return "" if self.block_calls is None else self.block_calls.words()

    def end_step(self, chunk_groups: Iterable[ChunkGroup]) -> None:
        """A step was made. Raises as BudgetMoves.end_step()."""
        host_bytes, device_bytes = self.tracer.end_step()
        for chunk_group in chunk_groups:
            chunk_group.order.end_step()
        self.predictions.end_step()
        if self.block_calls is not None:
            self.block_calls.end_step()
        self.budget_moves.end_step(host_bytes, device_bytes)
        for listener in self.listeners:
            listener()
