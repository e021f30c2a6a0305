"""The engine: one model and one optimizer, run inside the budgets."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.chunk_group import ChunkGroup, Shared
from hetero.chunks.layout import Layout
from hetero.planning.placement import Placement
from hetero.planning.step_cost import Plan
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.modules.call_stack import EnteredCalls
from hetero.runtime.modules.module_hooks import ModelHooks, ModuleHooks, move_rest, refuse_use
from hetero.runtime.modules.param_registry import AddsParams, ParamRegistry
from hetero.runtime.modules.torch_function_uses import TorchFunctionUses
from hetero.runtime.recompute.recompute import take_over_blocks
from hetero.runtime.relocation import BesideMemory, BudgetMoves, Change, InUseError, Relocation
from hetero.runtime.step import GradHook, OptimizerSteps
from hetero.runtime.step_watch import StepPredictions, StepTracer, StepWatch, io_stats
from hetero.runtime.update_schedule import OptimizerView
from hetero.state.managed_param import ManagedParam, can_train
from offload.errors import ClosedError, UnmanagedParameterError
from offload.interrupts import uninterrupted
from offload.memory.operation import THREAD_PREFIX, in_background
from offload.memory.tiers import StateKind


@dataclass(frozen=True)
class Traffic:
    """Bytes moved since the engine was made; disks' being measured does not count."""

    h2d: int
    d2h: int
    disk_read: int
    disk_write: int
    sent: int = 0  # to other ranks: shards of parameters, and of gradients to be averaged
    received: int = 0
    # Of what saved tensors are in, whole pages of the disk; h2d, d2h, disk_read and disk_write
    # have these bytes, too.
    activations_h2d: int = 0
    activations_d2h: int = 0
    activations_read: int = 0
    activations_written: int = 0


@dataclass(frozen=True)
class Seconds:
    """Seconds since the engine was made.

    Attributes:
        gather_wait_s: compute waited for chunks from other ranks: what prefetch did not hide.
        update_s: updates were being made, by the pipelines that exist now.
        update_wait_s: step(), or a use of a parameter, waited for updates.
    """

    gather_wait_s: float
    update_s: float
    update_wait_s: float


class Lifetime:
    """From the making of an engine until close(), the end of its model, or that of the program.

    Attributes:
        hooks: removes all hooks of the model.
        before_close: ends what goes on beside training.
        is_closed: close() has begun.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        params: ParamRegistry,
        shared: Shared,
        activations: ActivationStore | None,
    ) -> None:
        """Nothing is freed before begin(), but abort() takes the hooks off."""
        self.hooks, self.before_close = ExitStack(), ExitStack()
        self.is_closed = False
        self._params, self._shared, self._activations = params, shared, activations
        self._model = weakref.ref(model)
        self._model_hooks: list[ModelHooks] = []
        self._process = os.getpid()
        self._finalizer: weakref.finalize[..., Any] | None = None

    def begin(self) -> None:
        """The engine is made. It lives as long as the model; without close() it ends with it."""
        self._finalizer = weakref.finalize(self.model, self._outlive)

    def abort(self) -> None:
        """The engine could not be made."""
        self._detach_params()
        self.hooks.close()

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether the engine manages the model."""
        return self._model() is model

    @property
    def model(self) -> torch.nn.Module:
        """The model that the engine manages, without keeping it alive."""
        model = self._model()
        assert model is not None
        return model

    # Hooks on the whole model

    def add(self, model_hooks: ModelHooks) -> None:
        """Adds hooks, to be unwound and to cover what is added to the model."""
        self._model_hooks.append(model_hooks)

    def cover(self) -> None:
        """Hooks all modules, also new ones."""
        for model_hooks in self._model_hooks:
            model_hooks.cover(self.model)

    def unwind(self) -> None:
        """Ends forwards and loads of the model that an exception has interrupted."""
        for model_hooks in self._model_hooks:
            model_hooks.unwind()

    # End

    def check_usable(self) -> None:
        """As Engine.check_usable()."""
        if self.is_closed:
            raise ClosedError("this model's engine was closed; build the model again to continue")
        self._params.check_open()
        self.unwind()

    def close(self) -> None:
        """As Engine.close()."""
        if self.is_closed:
            return
        self.unwind()
        try:
            self._end()
        finally:
            if self._finalizer is not None:
                self._finalizer.detach()
            model = self._model()
            if model is not None:
                refuse_use(model, (m.param for m in self._params.managed.values()))
            self._detach_params()
            self._free()

    def _detach_params(self) -> None:
        self._params.close()
        for m in self._params.managed.values():
            m.close()

    def _outlive(self) -> None:
        """Frees everything when the model is gone, or the program ends."""
        # The garbage collector runs in any thread, also in one for whose end _free() waits.
        self.unwind()
        if in_background():
            threading.Thread(target=self._free, name=f"{THREAD_PREFIX}closing").start()
            return
        try:
            self._free()
        except KeyboardInterrupt:
            self._free()  # which waits for no other rank now
            raise

    def _end(self) -> None:
        """Ends what goes on beside training, and leaves the other ranks; once."""
        closed, self.is_closed = self.is_closed, True
        if closed or os.getpid() != self._process:
            return
        try:
            self.before_close.close()
        finally:
            self._params.leave()

    def _free(self) -> None:
        if os.getpid() != self._process:  # threads, locks and connections are the parent's
            return
        try:
            self._end()
        finally:
            self._params.close()
            self.hooks.close()
            if self._activations is not None:
                self._activations.close()
            for chunk_group in reversed(self._params.chunk_groups):
                chunk_group.close()
                chunk_group.world.close()
            self._shared.unmanaged.close()
            self._shared.backend.close()


class Engine:
    """One model and one optimizer, run inside the budgets.

    hetero.initialize() makes it; `optimizer.engine` is it. `ledger` has the bytes per tier,
    `chunk_groups` what lives where, `traffic` what was moved. The first chunk group has the
    parameters in the compute dtype. close() frees everything; the model cannot be used afterwards.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        chunk_groups: Sequence[ChunkGroup],
        shared: Shared,
        first_number: Mapping[int, int],
        optimizers: Sequence[OptimizerView],
        activations: ActivationStore | None = None,
    ) -> None:
        """Points the model's parameters to their homes and installs the hooks.

        If it raises, the hooks are off again; the chunk groups and the backend are the caller's to
        close. Otherwise close() does that. The engine does not keep the model alive.

        Args:
            chunk_groups: they have the parameters' values; the main one first.
            first_number: by a parameter's index, the number of its first element in the model.
        """
        self.shared = shared
        self.config, self.backend = shared.config, shared.backend
        self.ledger, self.notes = shared.ledger, shared.notes
        self.world: ProcessGroups = chunk_groups[0].world
        self.params = ParamRegistry(first_number)
        self.chunk_groups = self.params.chunk_groups
        self.lifetime = Lifetime(model, self.params, shared, activations)
        hooks, calls = self.lifetime.hooks, EnteredCalls()
        self.torch_function_uses = TorchFunctionUses(self.params, calls, activations)
        self.steps = OptimizerSteps(
            self.params, shared, self.world.shard, optimizers, lambda: self.watch.tracer
        )
        beside = BesideMemory(self.ledger, self.backend)
        try:
            for chunk_group in chunk_groups:
                self._take_over(chunk_group)
            module_hooks = ModuleHooks(
                model,
                self.params,
                self.torch_function_uses,
                calls,
                shared,
                self._before_forward,
                hooks,
            )
            self.lifetime.add(module_hooks)
            tracer = StepTracer(model, self.chunk_groups, beside, self.params.note_forward, hooks)
            uses = self.torch_function_uses.saved_tensors
            block_calls = take_over_blocks(model, self.params, shared, uses, activations)
            if block_calls is not None:
                hooks.callback(block_calls.remove)

            def pause() -> None:
                if module_hooks.running:
                    raise InUseError(
                        "homes cannot move while a forward is running; call it between steps"
                    )
                self.steps.pause()

            relocation = Relocation(self.params, shared, pause, self.homes_moved)
            budget_moves = BudgetMoves(relocation, beside, activations)
            schedule = self.steps.schedule
            predictions = StepPredictions(
                self.chunk_groups,
                shared,
                budget_moves.group_plans,
                tracer,
                lambda: schedule.speculates,
                activations,
            )
        except BaseException:
            self.lifetime.abort()
            raise
        self.watch = StepWatch(tracer, predictions, block_calls, budget_moves, activations)
        self.lifetime.begin()

    def attach(self, model_hooks: ModelHooks, added_params: AddsParams) -> None:
        """Adds hooks on the model, and what gives parameters a place later; called once."""
        self.lifetime.add(model_hooks)
        self.steps.attach(added_params)

    def take_over(self, chunk_groups: Sequence[ChunkGroup]) -> None:
        """Manages further chunk groups, whose values are there: their parameters move to them."""
        for chunk_group in chunk_groups:
            self._take_over(chunk_group)
        self.params.begin_gathers(chunk_groups)
        move_rest(self.model, self.params.managed, self.shared)
        self.homes_moved()

    def _take_over(self, chunk_group: ChunkGroup) -> None:
        self.chunk_groups.append(chunk_group)
        self.steps.grad_intake.take_over(chunk_group)
        for m in chunk_group.members:
            m.param._hetero_engine = self  # type: ignore[attr-defined]
            m.param._hetero_owner = self.torch_function_uses  # type: ignore[attr-defined]
            old = self.params.known(m.param)
            if old is not None:
                old.retire()
            home = chunk_group.memory.homes[StateKind.PARAM].resident(m.chunk)
            m.place(home, self.steps.grad_factors)
            self.params.managed[id(m.param)] = m
            if m.chunk.trainable:
                self.lifetime.hooks.callback(GradHook(m, self.steps.grad_intake).remove)

    def homes_moved(self) -> None:
        """Takes account of homes that have moved, or of parameters that were added."""
        self.lifetime.cover()
        # What was learned so far was of other placements.
        self.watch.predictions.learned.restart()

    @property
    def model(self) -> torch.nn.Module:
        """The model that this engine manages."""
        return self.lifetime.model

    @property
    def layout(self) -> Layout:
        """The layout of the main chunk group."""
        return self.chunk_groups[0].layout

    @property
    def placement(self) -> Placement:
        """The placement of the main chunk group."""
        return self.chunk_groups[0].placement

    def find(self, param: torch.Tensor) -> ManagedParam:
        """The ManagedParam of a parameter.

        Raises:
            UnmanagedParameterError: this engine does not manage it.
            ClosedError: the engine was closed.
        """
        self.check_usable()
        managed = self.params.known(param)
        if managed is None:
            raise UnmanagedParameterError(
                f"a parameter of shape {tuple(param.shape)} is not managed by this engine; pass "
                f"the model that owns it through hetero.initialize()"
            )
        return managed

    def find_all(self, params: Iterable[torch.Tensor]) -> list[ManagedParam]:
        """find() of those of `params` that have elements and can have gradients."""
        self.check_usable()
        managed = self.params.managed
        with torch._C.DisableTorchFunction():  # which a parameter's class is asked by
            return [
                managed[id(p)] if id(p) in managed else self.find(p)
                for p in params
                if p.numel() and can_train(p)
            ]

    # Gradients

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """loss.backward(**options), with the loss times the loss scale under fp16."""
        self.check_usable()
        self.steps.grad_intake.backward(loss, **options)

    @uninterrupted
    def with_grads(self, params: Iterable[torch.Tensor]) -> list[ManagedParam]:
        """Those of `params` that have gradients, after taking in assigned ones."""
        self.check_usable()
        # As ranks with data did in their forward, where this one may have had none.
        self.steps.added_params.take_in_unfrozen()
        return self.steps.grad_intake.of(self.find_all(params), force=True)

    @uninterrupted
    def grad_norm(self, params: Iterable[torch.Tensor]) -> float:
        """The 2-norm of the parameters' gradients, after the clipping and unscaling done so far.

        Summed in double in a fixed order: the same bits for every placement and chunk size.
        """
        return self.steps.grad_factors.total_norm(self.with_grads(params))

    # Steps

    def step(self, optimizer: OptimizerView) -> None:
        """Makes one update of the optimizer's parameters that have gradients, on all ranks or none.

        Homes may move after it. If they cannot, that is a note, unless it could not be undone.

        Raises:
            HeteroError: a change would be lost: a parameter was moved or unfrozen after
                initialize(), or this is inside gathered(); or ranks differ.
            NonFiniteError: a factor of a gradient is not finite, or fp16 gradients overflow at the
                smallest loss scale. Nothing is changed, here and above.
            BudgetError: the process needs more than process_memory. The step is made.
            NativeIoError, PeerError: a transfer, or a rank, failed.
        """
        self.check_usable()
        self.steps.begin()
        self.steps.make(
            [(g, self.find_all(g["params"])) for g in optimizer.param_groups()], optimizer
        )
        self.watch.end_step(self.chunk_groups)

    def _before_forward(self) -> None:
        if self.lifetime.is_closed:
            return
        self.check_usable()
        self.steps.schedule.finish_awaited()  # of a step() that an error ended
        if self.watch.block_calls is not None:
            self.watch.block_calls.begin_forward()
        if torch.is_grad_enabled():
            if self.backend.separate:  # hooks take gradients; a replay does not run them
                self.backend.check_not_capturing()
            # By all ranks together, so not in evaluation, which may be one rank's alone.
            self.steps.added_params.take_in_unfrozen()

    @uninterrupted
    def synchronize(self) -> None:
        """Waits until no transfer or update of the last step is under way. Raises what one met.

        All parameters in RAM have values then, whatever overlap_updates is. Optimizer states that
        buffers keep for the next step are not written by this.
        """
        self.check_usable()
        self.steps.schedule.wait_all()
        for chunk_group in self.chunk_groups:
            chunk_group.pipeline.wait_written()

    # Placement

    @uninterrupted
    def set_budget(
        self, host_memory: int | str | None = None, device_memory: int | str | None = None
    ) -> None:
        """From now on these are the budgets of RAM and DEVICE: homes move, in place.

        What is not given stays. Between steps, outside of gathered(), when no graph waits for its
        backward; with several ranks on all of them. No bit of the training changes. The old and the
        new budgets hold while homes move.

        Raises BudgetError with the smallest budget that works, HeteroError if something that would
        have to move is in use, StoreError or an OSError if it cannot be brought away; then nothing
        is changed. After a failed read what could not be read stays on NVMe.
        """
        self.check_usable()
        self.watch.budget_moves.set_budget(host_memory, device_memory)

    @property
    def changes(self) -> list[Change]:
        """The moves of homes so far, each with its step, its bytes and its reason."""
        return list(self.watch.budget_moves.changes)

    @property
    def plans(self) -> list[Plan]:
        """The placement of each chunk group, the main one first, and the step it is predicted to
        take; empty until a saved profile or two steps say how fast anything is."""
        return self.watch.predictions.plans()

    def explain(self) -> str:
        """A table for people of where state is, what a step is expected to take, what bounds it,
        and what one more GiB would save.

        Seconds are those of the saved profile of this machine (hetero profile), or of this
        training's own steps. Bytes are of this rank. Takes a few placements' time.
        """
        return "\n\n".join(filter(None, (self.watch.predictions.explain(), self.watch.words())))

    # Facts

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far; between DEVICE and HOST none if they are the same memory."""
        backend, activations = self.backend, self.watch.activations
        io = io_stats(self.chunk_groups, activations)
        groups = [peers for each in self.chunk_groups for peers in each.world.groups()]
        return Traffic(
            *(backend.h2d_bytes, backend.d2h_bytes),
            *(int(io["read_bytes"]), int(io["written_bytes"])),
            sum(peers.sent_bytes for peers in groups),
            sum(peers.received_bytes for peers in groups),
            *((0, 0, 0, 0) if activations is None else activations.moved_bytes),
        )

    @property
    def seconds(self) -> Seconds:
        """Seconds of updates, and of waits for them and for other ranks, so far."""
        ranks = (each.ranks for each in self.chunk_groups if each.ranks is not None)
        return Seconds(
            sum(each.gathering.wait_s for each in ranks if each.gathering is not None),
            sum(float(each.pipeline.stats["busy_s"]) for each in self.chunk_groups),
            sum(each.update_wait_s for each in self.chunk_groups),
        )

    @property
    def io_engine(self) -> str | None:
        """ "io_uring" or "threads"; None if nothing is homed on DISK."""
        return next((g.disk.io.kind for g in self.chunk_groups if g.disk is not None), None)

    # End

    def check_usable(self) -> None:
        """Before any use: what was interrupted ends.

        Raises:
            ClosedError: the engine was closed.
            HeteroError: an interruption has left values half changed.
        """
        self.lifetime.check_usable()

    @uninterrupted
    def close(self) -> None:
        """Frees memory, file and threads; idempotent. Any later use raises ClosedError.

        With several ranks all should call it: each answers the others until they do, too. When all
        is freed it raises what a save or commit beside training met, if nobody was told of it.
        """
        self.lifetime.close()
