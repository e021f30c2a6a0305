"""The engine: one model and one optimizer, run inside the budgets."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunk_groups.shared import Shared
from hetero.chunks.layout import Layout
from hetero.planning.placement import Placement
from hetero.planning.step_cost import Plan
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.gradients.grad_factors import GradFactors
from hetero.runtime.gradients.grad_intake import GradHook, GradIntake
from hetero.runtime.last_step import LastStep, OldState
from hetero.runtime.modules.call_stack import EnteredCalls
from hetero.runtime.modules.module_hooks import ModelHooks, ModuleHooks, refuse_use
from hetero.runtime.modules.param_registry import AddsParams, ParamRegistry
from hetero.runtime.modules.torch_function_uses import TorchFunctionUses
from hetero.runtime.recompute.recompute import Recompute
from hetero.runtime.relocation.budget_moves import BudgetMoves
from hetero.runtime.relocation.memory_limit import BesideMemory
from hetero.runtime.relocation.migration import InUseError
from hetero.runtime.relocation.relocate import Change, Relocation
from hetero.runtime.step import check_factors, check_left_out, check_updatable, meet_with_same
from hetero.runtime.step_predictions import StepPredictions
from hetero.runtime.step_tracer import StepTracer
from hetero.runtime.to_device import move_rest
from hetero.runtime.traffic import Traffic, traffic_of
from hetero.runtime.update_schedule import OptimizerView, UpdateSchedule
from hetero.state.managed_param import ManagedParam, can_train
from offload.errors import ClosedError, NonFiniteError, UnmanagedParameterError
from offload.interrupts import uninterrupted
from offload.memory.operation import THREAD_PREFIX, in_background
from offload.memory.tiers import StateKind


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
        self.ledger, self.notes, self.loss_scale = shared.ledger, shared.notes, shared.loss_scale
        self.first_number = dict(first_number)
        self.world: ProcessGroups = chunk_groups[0].world
        self.params = ParamRegistry()
        self.chunk_groups = self.params.chunk_groups
        self.schedule = UpdateSchedule(self.params, self.config, shared.loss_scale, optimizers)
        self.last_step = LastStep(self.params, self.schedule, shared, self.world)
        self.grad_intake = GradIntake(
            self.params, self.loss_scale, self.schedule, self._note_backward
        )
        self.grad_factors = GradFactors(
            self.params, self.grad_intake, shared, self.world.shard, lambda: self.tracer.forget()
        )
        calls = EnteredCalls()
        self.activations = activations
        self.torch_function_uses = TorchFunctionUses(self.params, calls, activations)
        self._model = weakref.ref(model)
        self.optimizers = optimizers
        self._added_params: AddsParams | None = None
        self.hooks = ExitStack()  # removes all hooks
        self.before_close = ExitStack()  # ends what goes on beside training
        self._model_hooks: list[ModelHooks] = []
        self._closed = False
        self._process = os.getpid()
        beside = BesideMemory(self.ledger, self.backend)
        try:
            for chunk_group in chunk_groups:
                self._take_over(chunk_group)
            self._module_hooks = ModuleHooks(
                model,
                self.params,
                self.torch_function_uses,
                calls,
                shared,
                self._before_forward,
                self.hooks,
            )
            self._model_hooks.append(self._module_hooks)
            self.tracer = StepTracer(
                model, self.chunk_groups, beside, self.params.note_forward, self.hooks
            )
            self.hooks.callback(beside.close)
            uses = self.torch_function_uses.saved_tensors
            self.recompute = Recompute(model, self.params, shared, uses, activations)
            self.hooks.callback(self.recompute.close)
            relocation = Relocation(self.params, shared, self._pause, self.homes_moved)
            self.budget_moves = BudgetMoves(relocation, beside, activations)
            self.predictions = StepPredictions(
                self.chunk_groups, shared, self.budget_moves.group_plans, self.tracer, activations
            )
        except BaseException:
            self._detach_params()
            self.hooks.close()
            raise
        # The engine lives as long as the model; without close() it ends with it, or at exit.
        self._finalizer = weakref.finalize(model, self._outlive)

    def attach(self, model_hooks: ModelHooks, added_params: AddsParams) -> None:
        """Adds hooks on the model, and what gives parameters a place later; called once."""
        self._model_hooks.append(model_hooks)
        self._added_params = added_params

    @property
    def added_params(self) -> AddsParams:
        """What gives parameters a place after initialize()."""
        self.check_usable()
        assert self._added_params is not None
        return self._added_params

    def take_over(self, chunk_groups: Sequence[ChunkGroup]) -> None:
        """Manages further chunk groups, whose values are there: their parameters move to them."""
        for chunk_group in chunk_groups:
            self._take_over(chunk_group)
        self.params.begin_gathers(chunk_groups)
        move_rest(self.model, self.params.managed, self.shared)
        self.homes_moved()

    def _take_over(self, chunk_group: ChunkGroup) -> None:
        self.chunk_groups.append(chunk_group)
        self.grad_intake.take_over(chunk_group)
        for m in chunk_group.members:
            m.param._hetero_engine = self  # type: ignore[attr-defined]
            m.param._hetero_owner = self.torch_function_uses  # type: ignore[attr-defined]
            old = self.params.known(m.param)
            if old is not None:
                old.retire()
            m.place(chunk_group.memory.homes[StateKind.PARAM].resident(m.chunk))
            self.params.managed[id(m.param)] = m
            if m.chunk.trainable:
                m.let_change_grad(self.grad_factors)
                self.hooks.callback(GradHook(m, self.grad_intake).remove)

    def homes_moved(self) -> None:
        """Takes account of homes that have moved, or of parameters that were added."""
        for model_hooks in self._model_hooks:
            model_hooks.cover(self.model)
        self.predictions.learned.restart()  # what was learned so far was of other placements

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether this engine manages the model."""
        return self._model() is model

    @property
    def model(self) -> torch.nn.Module:
        """The model that this engine manages."""
        model = self._model()
        assert model is not None
        return model

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

    def optimizer_of(self, param: torch.Tensor) -> OptimizerView | None:
        """The optimizer that has the parameter; None if none has."""
        for optimizer in self.optimizers:
            if any(p is param for group in optimizer.param_groups() for p in group["params"]):
                return optimizer
        return None

    # Gradients

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """loss.backward(**options), with the loss times the loss scale under fp16."""
        self.check_usable()
        self.grad_intake.backward(loss, **options)

    @uninterrupted
    def with_grads(self, params: Iterable[torch.Tensor]) -> list[ManagedParam]:
        """Those of `params` that have gradients, after taking in assigned ones."""
        return self.grad_intake.of(self.find_all(params))

    @uninterrupted
    def grad_norm(self, params: Iterable[torch.Tensor]) -> float:
        """The 2-norm of the parameters' gradients, after the clipping and unscaling done so far.

        Summed in double in a fixed order: the same bits for every placement and chunk size.
        """
        return self.grad_factors.total_norm(self.with_grads(params))

    def _note_backward(self) -> None:
        self.tracer.gradient()
        self.last_step.forget(OldState.BACKWARD)

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
        self.schedule.wait_all()
        self.added_params.take_in_unfrozen()
        self.grad_intake.average(force=True)
        managed = self.params.managed.values()
        listed = [(g, self.find_all(g["params"])) for g in optimizer.param_groups()]
        given = dict.fromkeys(m for _, members in listed for m in members)
        check_left_out(managed, self.optimizer_of)
        self.params.take_in_written(given)
        for m in given:
            check_updatable(m)
        groups = [(options, self.grad_intake.of(members)) for options, members in listed]
        members = [m for _, some in groups for m in some]
        overflow = self.loss_scale.dynamic and self.grad_factors.any_non_finite(members)
        self.params.finish_transfers("optimizer.step()", ends_step=True)
        meet_with_same(groups, managed, optimizer.options, optimizer.lr_scale_of, self.world)
        if overflow and self.loss_scale.value <= 1:
            raise NonFiniteError(
                "fp16 gradients overflow although the loss scale is down to 1; use dtype='bf16' or "
                "'fp32', whose range is wider"
            )
        if members and not overflow:
            check_factors(members)
            self.last_step.begin(optimizer, members)
            self.schedule.step(groups, optimizer)
        else:
            self.last_step.begin(optimizer, [])
            self.schedule.revoke_all()
        if members:
            self.loss_scale.update(overflow)
        self.last_step.end()
        self._end_step()

    def _end_step(self) -> None:
        """Looks at the step that was made: its seconds, its rates and its memory."""
        self.schedule.end_step()
        host_bytes, device_bytes = self.tracer.end_step()
        for chunk_group in self.chunk_groups:
            chunk_group.order.end_step()
        self.predictions.end_step()
        self.recompute.end_step(self.tracer.latest, self.predictions.learned.per_step)
        self.budget_moves.end_step(host_bytes, device_bytes)
        self.last_step.tell()

    def meet(self, what: str) -> None:
        """Waits for all ranks, so that none of them still reads values that are about to change.

        Raises PeerError if a rank does not come; `what` says what they are about to do.
        """
        self.schedule.wait_all()
        self.params.finish_transfers(what)
        self.world.meet(what)

    # Calls of the model

    def unwind(self) -> None:
        """Ends forwards and loads of the model that an exception has interrupted."""
        for model_hooks in self._model_hooks:
            model_hooks.unwind()

    def _before_forward(self) -> None:
        if self._closed:
            return
        self.check_usable()
        self.schedule.finish_awaited()  # of a step() that an error ended
        self.recompute.begin_forward()
        if torch.is_grad_enabled():
            self.backend.check_not_capturing()  # hooks take gradients; a replay does not run them
            # By all ranks together, so not in evaluation, which may be one rank's alone.
            self.added_params.take_in_unfrozen()

    @uninterrupted
    def synchronize(self) -> None:
        """Waits until no transfer or update of the last step is under way. Raises what one met.

        All parameters in RAM have values then, whatever overlap_updates is. Optimizer states that
        buffers keep for the next step are not written by this.
        """
        self.check_usable()
        self.schedule.wait_all()
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
        self.budget_moves.set_budget(host_memory, device_memory)

    def _pause(self) -> None:
        """Until no update is under way, so that homes can move."""
        if self._module_hooks.running:
            raise InUseError("homes cannot move while a forward is running; call it between steps")
        self.schedule.revoke_all()
        self.schedule.wait_all()
        self.schedule.wait_copied()
        self.last_step.forget(OldState.MOVED)
        for chunk_group in self.chunk_groups:
            chunk_group.updates.versions.free_all()
        self.params.take_in_written(self.params.managed.values())

    @property
    def changes(self) -> list[Change]:
        """The moves of homes so far, each with its step, its bytes and its reason."""
        return list(self.budget_moves.changes)

    @property
    def plans(self) -> list[Plan]:
        """The placement of each chunk group, the main one first, and the step it is predicted to
        take; empty until a saved profile or two steps say how fast anything is."""
        return self.predictions.plans()

    def explain(self) -> str:
        """A table for people of where state is, what a step is expected to take, what bounds it,
        and what one more GiB would save.

        Seconds are those of the saved profile of this machine (hetero profile), or of this
        training's own steps. Bytes are of this rank. Takes a few placements' time.
        """
        return "\n\n".join(filter(None, (self.predictions.explain(), self.recompute.words())))

    # Facts

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far; between DEVICE and HOST none if they are the same memory."""
        return traffic_of(self.chunk_groups, self.backend, self.activations)

    @property
    def gather_wait_s(self) -> float:
        """Seconds that compute waited for chunks from other ranks: what prefetch did not hide."""
        ranks = (each.ranks for each in self.chunk_groups if each.ranks is not None)
        return sum(each.gathering.wait_s for each in ranks if each.gathering is not None)

    @property
    def update_s(self) -> float:
        """Seconds during which updates were being made, by the pipelines that exist now."""
        return sum(float(each.pipeline.stats["busy_s"]) for each in self.chunk_groups)

    @property
    def update_wait_s(self) -> float:
        """Seconds that step(), or a use of a parameter, waited for updates."""
        return sum(chunk_group.update_wait_s for chunk_group in self.chunk_groups)

    @property
    def io_engine(self) -> str | None:
        """ "io_uring" or "threads"; None if nothing is homed on DISK."""
        return next((g.disk.io.kind for g in self.chunk_groups if g.disk is not None), None)

    def managed_params(self) -> list[ManagedParam]:
        """All managed parameters, in the model's order."""
        return sorted(self.params.managed.values(), key=lambda m: m.slice.param.index)

    # End

    def check_usable(self) -> None:
        """Before any use: what was interrupted ends.

        Raises:
            ClosedError: the engine was closed.
            HeteroError: an interruption has left values half changed.
        """
        if self._closed:
            raise ClosedError("this model's engine was closed; build the model again to continue")
        self.params.check_open()
        self.unwind()

    @uninterrupted
    def close(self) -> None:
        """Frees memory, file and threads; idempotent. Any later use raises ClosedError.

        With several ranks all should call it: each answers the others until they do, too. When all
        is freed it raises what a save or commit beside training met, if nobody was told of it.
        """
        if self._closed:
            return
        self.unwind()
        try:
            self._end()
        finally:
            self._finalizer.detach()
            model = self._model()
            if model is not None:
                refuse_use(model, (m.param for m in self.params.managed.values()))
            self._detach_params()
            self._free()

    def _detach_params(self) -> None:
        self.params.close()
        for m in self.params.managed.values():
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
        closed, self._closed = self._closed, True
        if closed or os.getpid() != self._process:
            return
        try:
            self.before_close.close()
        finally:
            self.params.leave(self.world)

    def _free(self) -> None:
        if os.getpid() != self._process:  # threads, locks and connections are the parent's
            return
        try:
            self._end()
        finally:
            self.params.close()
            self.hooks.close()
            if self.activations is not None:
                self.activations.close()
            for chunk_group in reversed(self.chunk_groups):
                chunk_group.close()
                chunk_group.world.close()
            self.shared.unmanaged.close()
            self.backend.close()
