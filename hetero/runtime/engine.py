"""The engine: one model and one optimizer, run inside the budgets."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from hetero.chunk_groups.build import Shared
from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunk_groups.update_tasks import HyperOf
from hetero.chunks.layout import Layout
from hetero.overlap import OverlapUpdates
from hetero.planning.placement import Placement
from hetero.planning.predict import Plan
from hetero.ranks.process_groups import ProcessGroups, error_that_ends_this_rank
from hetero.runtime.gradients.grad_factors import GradFactors
from hetero.runtime.gradients.grad_hook import GradHook
from hetero.runtime.gradients.gradients import Gradients
from hetero.runtime.modules.all_params import AllParams
from hetero.runtime.modules.module_hooks import ModuleHooks, refuse_use
from hetero.runtime.modules.saved_tensors import SavedTensors
from hetero.runtime.optimizer_view import OptimizerView
from hetero.runtime.relocation.budget_moves import BudgetMoves
from hetero.runtime.relocation.memory_limit import BesideMemory
from hetero.runtime.relocation.moves import InUseError
from hetero.runtime.relocation.relocate import Change
from hetero.runtime.step import OptimizerStep
from hetero.runtime.step_predictions import StepPredictions
from hetero.runtime.step_tracer import StepTracer
from hetero.runtime.to_device import move_rest
from hetero.runtime.traffic import Traffic, traffic_of
from hetero.runtime.update_schedule import UpdateSchedule
from hetero.state.loss_scale import LossScale
from hetero.state.managed_param import ManagedParam, can_train
from offload import _native
from offload.errors import ClosedError, HeteroError, UnmanagedParameterError
from offload.memory.operation import THREAD_PREFIX, in_background


class ModelHooks(Protocol):
    """Hooks on the model's modules."""

    def remove(self) -> None:
        """Takes them off."""

    def cover(self, model: torch.nn.Module) -> None:
        """Takes account of parameters whose homes have moved, and of modules that are new."""

    def unwind(self) -> None:
        """Ends calls of modules that an exception has interrupted."""


class AddsParams(Protocol):
    """Gives parameters a place that they did not get at initialize()."""

    def take_in_unfrozen(self) -> None:
        """Adds frozen parameters that need gradients by now and are the optimizer's."""

    def admit(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Adds the parameters of a new param group."""


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
        optimizer: OptimizerView,
    ) -> None:
        """Points the model's parameters to their homes and installs the hooks.

        If it raises, the hooks are off again; the chunk groups and the backend are the caller's to
        close. Otherwise close() does that.

        Args:
            model: the model, which the engine does not keep alive.
            chunk_groups: its chunk groups, which have the values; the main one first.
            shared: configuration, device, ledger and notes of all chunk groups.
            first_number: by a parameter's index, the number of its first element in the model.
            optimizer: the optimizer's param groups.
            planner: chooses placements anew when steps were measured; None: by sizes alone.
        """
        self.chunk_groups: list[ChunkGroup] = []
        self.shared = shared
        self.config, self.backend = shared.config, shared.backend
        self.ledger, self.notes = shared.ledger, shared.notes
        self.first_number = dict(first_number)
        self.loss_scale: LossScale = shared.loss_scale
        self.world: ProcessGroups = chunk_groups[0].world
        overlap = self.config.overlap
        self.params = AllParams(self.chunk_groups)
        self.schedule = UpdateSchedule(self.chunk_groups, overlap, self.config.prefetch, optimizer)
        self.gradients = Gradients(
            self.chunk_groups,
            self.loss_scale,
            self.schedule,
            note_backward=lambda: self.tracer.gradient(),
        )
        self.grad_factors = GradFactors(
            self.chunk_groups,
            self.gradients,
            self.loss_scale,
            self.world,
            overlap,
            step_left_out=lambda: self.tracer.forget(),
        )
        self._model = weakref.ref(model)
        self._managed: dict[int, ManagedParam] = {}
        self._step = OptimizerStep(
            self._managed,
            self.params,
            self.gradients,
            self.grad_factors,
            self.schedule,
            self.loss_scale,
            self.world,
        )
        self._added_params: AddsParams | None = None
        self._hooks = ExitStack()  # removes all hooks
        self._model_hooks: list[ModelHooks] = []
        self._closed = False
        self._process = os.getpid()
        beside = BesideMemory(self.ledger, self.backend)
        try:
            for chunk_group in chunk_groups:
                self._take_over(chunk_group)
            self._module_hooks = self._make_module_hooks(model)
            self.tracer = StepTracer(model, self.chunk_groups, beside)
            self._hooks.callback(self.tracer.remove)
            self.budget_moves = BudgetMoves(self, beside)
            self._hooks.callback(self.budget_moves.remove)
            self._predictions = StepPredictions(
                self, self.budget_moves.group_plans, lambda: self.tracer.latest
            )
        except BaseException:
            self._detach_params()
            self._hooks.close()
            raise
        # The engine lives as long as the model; without close() it ends with it, or at exit.
        self._finalizer = weakref.finalize(model, self._outlive)

    def _make_module_hooks(self, model: torch.nn.Module) -> ModuleHooks:
        module_hooks = ModuleHooks(
            model,
            self.known,
            self.params,
            SavedTensors(self.chunk_groups, self.params),
            self._before_forward,
            self.chunk_groups[0].dtypes.torch_compute,
            self.backend.device,
            all_modules=self.config.overlap is not OverlapUpdates.NONE,
        )
        self._hooks.callback(module_hooks.remove)
        self._model_hooks.append(module_hooks)
        return module_hooks

    def attach(self, hooks: ModelHooks, added_params: AddsParams) -> None:
        """Completes the engine; called once, by initialize().

        Args:
            hooks: further hooks on the model, which close() removes.
            added_params: gives parameters a place later.
        """
        self._model_hooks.append(hooks)
        self._hooks.callback(hooks.remove)
        self._added_params = added_params

    @property
    def added_params(self) -> AddsParams:
        """What gives parameters a place after initialize()."""
        self._check_open()
        assert self._added_params is not None
        return self._added_params

    def take_over(self, chunk_groups: Iterable[ChunkGroup]) -> None:
        """Manages further chunk groups, whose values are there: their parameters move to them."""
        for chunk_group in chunk_groups:
            self._take_over(chunk_group)
        move_rest(self.model, self._managed, self.backend.device)
        self.homes_moved()

    def _take_over(self, chunk_group: ChunkGroup) -> None:
        self.chunk_groups.append(chunk_group)
        self.params.follow_homes(chunk_group)
        self.gradients.take_over(chunk_group)
        for m in chunk_group.members:
            m.param._hetero_engine = self  # type: ignore[attr-defined]
            old = self._managed.get(id(m.param))
            if old is not None:
                old.retire()
            m.place(chunk_group.params.home(m.chunk))
            self._managed[id(m.param)] = m
            if m.chunk.trainable:
                m.let_change_grad(self.grad_factors)
                self._hooks.callback(GradHook(m, self.gradients).remove)

    def finish_updates(self) -> None:
        """Waits until no update is under way, so that homes can move."""
        self._check_open()
        self.schedule.wait_all()

    def homes_moved(self) -> None:
        """Takes account of homes that have moved, or of parameters that were added."""
        for hooks in self._model_hooks:
            hooks.cover(self.model)
        for chunk_group in self.chunk_groups:
            self.params.follow_homes(chunk_group)
        self._predictions.homes_moved()

    @property
    def model(self) -> torch.nn.Module:
        """The model that this engine manages."""
        model = self._model()
        assert model is not None
        return model

    def known(self, param: torch.Tensor) -> ManagedParam | None:
        """The ManagedParam of a tensor; None if this engine does not manage it."""
        return self._managed.get(id(param))

    def chunk_group_of(self, managed: ManagedParam) -> ChunkGroup:
        """The chunk group that has a parameter."""
        return self.chunk_groups[managed.chunk.group_index]

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
        self._check_open()
        managed = self._managed.get(id(param))
        if managed is None:
            raise UnmanagedParameterError(
                f"a parameter of shape {tuple(param.shape)} is not managed by this engine; pass "
                f"the model that owns it through hetero.initialize()"
            )
        return managed

    def find_all(self, params: Iterable[torch.Tensor]) -> list[ManagedParam]:
        """find() of those of `params` that have elements and can have gradients."""
        return [self.find(p) for p in params if p.numel() and can_train(p)]

    # Gradients

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """loss.backward(**options), with the loss times the loss scale under fp16."""
        self._check_open()
        self.gradients.backward(loss, **options)

    def with_grads(self, params: Iterable[torch.Tensor]) -> list[ManagedParam]:
        """Those of `params` that have gradients, after taking in assigned ones."""
        return self.gradients.of(self.find_all(params))

    def grad_norm(self, params: Iterable[torch.Tensor]) -> float:
        """The 2-norm of the parameters' gradients, unscaled, as far as they are clipped by now.

        Summed in double per parameter in a fixed order, then over parameters in the model's order:
        the same bits for every placement and chunk size.
        """
        return self.grad_factors.total_norm(self.with_grads(params))

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block gradients are added up on each rank and nothing is sent.

        They are kept whole until the first backward outside, within host_memory. More gradients of
        the step are known to come, so none is final: no update is submitted.
        """
        return self.gradients.no_sync()

    # Steps

    def step(self, param_groups: Sequence[dict[str, Any]], hyper_of: HyperOf) -> None:
        """Makes one optimizer update of all parameters that have gradients.

        Homes may move after it. If they cannot, that is a note, unless it could not be undone.

        Args:
            param_groups: the optimizer's param groups.
            hyper_of: what their options mean.

        Raises:
            HeteroError: a change would be lost: a parameter was moved or unfrozen after
                initialize(), or this is inside gathered(). Nothing is changed.
            BudgetError: the process needs more than process_memory. The step is made.
            NativeIoError, PeerError: a transfer, or a rank, failed.
        """
        self._check_open()
        self.unwind()
        self.schedule.wait_all()
        self.added_params.take_in_unfrozen()
        self.gradients.average(force=True)
        groups = [(group, self.find_all(group["params"])) for group in param_groups]
        self._check_left_out({m for _, members in groups for m in members})
        self._step.make(groups, hyper_of)
        self.schedule.end_step()
        self._end_step()

    def _end_step(self) -> None:
        """Looks at the step that was made: its seconds, its rates and its memory."""
        made = self.tracer.end_step()
        host_bytes = self.tracer.take_evaluation_bytes()
        device_bytes = 0
        if made is not None:
            host_bytes = max(host_bytes, made.peak_host_bytes)
            device_bytes = made.peak_device_bytes
        for chunk_group in self.chunk_groups:
            chunk_group.order.end_step()
        self._predictions.end_step()
        self.budget_moves.end_step(host_bytes, device_bytes)

    def meet(self, said: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Waits for all ranks, so that none of them still reads values that are about to change.

        Args:
            said: what this rank tells the others: a tensor of the same shape and dtype on each.
            what: what the ranks are about to do, for errors.

        Returns:
            What each rank said, in their order.

        Raises:
            PeerError: a rank did not come.
        """
        self.schedule.wait_all()
        self.params.settle()
        return self.world.all_gather(said, what)

    def _check_left_out(self, given: Collection[ManagedParam]) -> None:
        """Raises HeteroError for a gradient of what was frozen and is in no param group."""
        for m in self._managed.values():
            frozen = m.was_frozen and not m.chunk.trainable
            if frozen and m.param.grad is not None and m not in given:
                raise HeteroError(
                    f"{m.name} was frozen at hetero.initialize() and has a gradient now, but no "
                    f"param group has it; add it with optimizer.add_param_group()"
                )

    # Calls of the model

    def unwind(self) -> None:
        """Ends forwards and loads of the model that an exception has interrupted."""
        for hooks in self._model_hooks:
            hooks.unwind()

    def _before_forward(self) -> None:
        self.unwind()
        # Ranks may evaluate alone, but train together.
        if self._closed:
            return
        if not self.schedule.overlap.in_forward:
            self.schedule.wait_all()  # of a step() that Ctrl-C ended
        if torch.is_grad_enabled():
            self.added_params.take_in_unfrozen()

    def synchronize(self) -> None:
        """Waits until no transfer or update of the last step is under way. Raises what one met.

        All parameters in RAM have values then, whatever overlap_updates is. Optimizer states that
        buffers keep for the next step are not written by this.
        """
        self._check_open()
        self.schedule.wait_all()
        for chunk_group in self.chunk_groups:
            chunk_group.pipeline.wait_written()

    # Placement

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
        self._check_open()
        self.schedule.require_whole("set_budget()")
        self.budget_moves.set_budget(host_memory, device_memory)

    def pause(self) -> None:
        """Until no update is under way, so that homes can move.

        Raises:
            InUseError: a forward is running.
        """
        if self._module_hooks.running:
            raise InUseError("homes cannot move while a forward is running; call it between steps")
        self.schedule.wait_all()

    @property
    def changes(self) -> list[Change]:
        """The moves of homes so far, each with its step, its bytes and its reason."""
        return list(self.budget_moves.changes)

    @property
    def plans(self) -> list[Plan]:
        """The placement of each chunk group, the main one first, and the step it is predicted to
        take; empty until a saved profile or two steps say how fast anything is."""
        return self.predicted_plans()

    def predicted_plans(self, grad_factors: bool = False) -> list[Plan]:
        """As `plans`; with `grad_factors` of steps that take the norm of all gradients."""
        return self._predictions.plans(grad_factors)

    def explain(self) -> str:
        """A table for people of where state is, what a step is expected to take, what bounds it,
        and what one more GiB would save.

        Seconds are those of the saved profile of this machine (hetero profile), or of this
        training's own steps. Bytes are of this rank. Takes a few placements' time.
        """
        return self._predictions.explain()

    # Facts

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far; between DEVICE and HOST none if they are the same memory."""
        return traffic_of(self.chunk_groups, self.backend)

    @property
    def gather_wait_s(self) -> float:
        """Seconds that compute waited for chunks from other ranks: what prefetch did not hide."""
        ranks = (chunk_group.ranks for chunk_group in self.chunk_groups)
        gatherings = (r.gathering for r in ranks if r is not None)
        return sum(g.wait_s for g in gatherings if g is not None)

    @property
    def io_engine(self) -> str | None:
        """ "io_uring" or "threads"; None if nothing is homed on DISK."""
        return next(
            (
                chunk_group.disk.io.kind
                for chunk_group in self.chunk_groups
                if chunk_group.disk is not None
            ),
            None,
        )

    @property
    def isa(self) -> str:
        """The instruction set that the optimizer's kernels use."""
        return _native.isa()

    def managed_params(self) -> list[ManagedParam]:
        """All managed parameters, in the model's order."""
        return sorted(self._managed.values(), key=lambda m: m.slice.param.index)

    # End

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this model's engine was closed; build the model again to go on")

    def close(self) -> None:
        """Frees memory, file and threads; idempotent. Any later use raises ClosedError.

        With several ranks all should call it: each answers the others until they do, too.
        """
        if self._closed:
            return
        self._leave_ranks()
        self._closed = True
        self._finalizer.detach()
        model = self._model()
        if model is not None:
            refuse_use(
                model,
                lambda: ClosedError("the model was used after its engine was closed"),
            )
        self._detach_params()
        self._free()

    def _detach_params(self) -> None:
        for m in self._managed.values():
            m.close()

    def _outlive(self) -> None:
        """Frees everything when the model is gone, or the program ends."""
        # The garbage collector runs in any thread, also in one for whose end _free() waits.
        if in_background():
            threading.Thread(target=self._free, name=f"{THREAD_PREFIX}closing").start()
        else:
            self._free()

    def _leave_ranks(self) -> None:
        if self.world.shard is None or os.getpid() != self._process:
            return
        error = error_that_ends_this_rank()
        if error is not None:  # other ranks see this process end sooner if it does not linger
            self.world.failures.note(-1, f"{self.world.name} ended by {error!r}")
        for chunk_group in self.chunk_groups:
            chunk_group.leave()

    def _free(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child: threads, locks and connections are its parent's
        if not self._closed:
            self._leave_ranks()
        self._closed = True
        self._hooks.close()
        for chunk_group in reversed(self.chunk_groups):
            chunk_group.close()
            chunk_group.world.close()
        self.backend.close()
