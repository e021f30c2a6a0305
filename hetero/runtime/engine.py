"""The engine: one model and one optimizer, run inside the budgets."""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunk_groups.update_tasks import Groups, HyperOf, HyperTable, hyper_table
from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.config import Config
from hetero.planning.placement import Placement
from hetero.planning.planner import EXPECTED_TOKENS, Planner
from hetero.planning.report import explain_chunk_groups
from hetero.planning.search import Plan
from hetero.planning.trace import Trace
from hetero.ranks.process_groups import World
from hetero.runtime.all_params import AllParams
from hetero.runtime.early_updates import EarlyUpdates
from hetero.runtime.grad_factors import GradFactors, check_dense
from hetero.runtime.loss_scale import LossScale
from hetero.runtime.module_hooks import GradHook, ModuleHooks, refuse_use
from hetero.runtime.read_ahead import ReadingAhead
from hetero.runtime.relocation.relocate import Change
from hetero.runtime.relocation.replanner import Replanner
from hetero.runtime.to_device import move_rest
from hetero.runtime.traffic import Traffic, traffic_of
from hetero.runtime.updates_in_flight import Unfinished
from hetero.setup.added_groups import extension
from hetero.setup.added_params import Later
from hetero.state.managed_param import ManagedParam, can_train
from offload import _native
from offload.device.backend import Backend
from offload.errors import ClosedError, HeteroError, NonFiniteError, UnmanagedParameterError
from offload.memory.ledger import Ledger
from offload.memory.operation import THREAD_PREFIX, in_background


class Removable(Protocol):
    """Something that was put on the model."""

    def remove(self) -> None:
        """Takes it off again."""


class ModelHooks(Removable, Protocol):
    """Hooks on modules."""

    def cover(self, model: torch.nn.Module) -> None:
        """Follows parameters and modules that have changed."""


class Engine:
    """Made by hetero.initialize(); reached as `optimizer.engine`.

    `ledger` has the bytes per tier, `chunk groups` what lives where, `traffic` what was moved. The
    first chunk group has the parameters in the compute dtype. close() frees everything; the model
    cannot be used afterwards.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        chunk_groups: list[ChunkGroup],
        backend: Backend,
        config: Config,
        first_number: Mapping[int, int],
        ledger: Ledger,
        loss_scale: LossScale,
        notes: list[str],
        planner: Planner | None = None,
    ) -> None:
        """`first_number` is, by a parameter's index, the number of its first element."""
        self.chunk_groups: list[ChunkGroup] = []
        self.backend = backend
        self.config = config
        self.first_number = dict(first_number)
        self.ledger = ledger
        self.loss_scale = loss_scale
        self.notes = notes
        self.world: World = chunk_groups[0].world
        self.params = AllParams(self.chunk_groups)
        self.grad_factors = GradFactors(
            self.chunk_groups, loss_scale, self.world, config.early_updates
        )
        self.unfinished = Unfinished(self.chunk_groups, config)
        self.early = EarlyUpdates(
            self.chunk_groups,
            self.params,
            self.unfinished,
            config.early_updates,
            accumulating=lambda: bool(self._unsynced),
        )
        self.grad_factors.check_assigned = self.early.check_gradient
        self._reading_ahead = ReadingAhead(self.chunk_groups, config.prefetch)
        self._model = weakref.ref(model)
        self._managed: dict[int, ManagedParam] = {}
        self._later = Later(self)
        self._hooks: list[Removable] = []
        self._unsynced: list[ExitStack] = []  # what the no_sync() blocks that are open have entered
        self._scaled_backward = False
        self._closed = False
        self._process = os.getpid()
        for chunk_group in chunk_groups:
            self._take_over(chunk_group)
        self._module_hooks = ModuleHooks(
            model,
            self.known,
            self.params,
            self.dtypes.torch_compute,
            self._before_forward,
            backend.device,
            all_modules=config.early_updates or config.late_updates,
        )
        self._model_hooks: list[ModelHooks] = [self._module_hooks]
        self._replanner = Replanner(self, planner)
        self.grad_factors.step_left_out = self._replanner.tracer.forget
        self._model_hooks.append(self._replanner)
        # The engine lives as long as the model; without close() it ends with it, or at exit.
        self._finalizer = weakref.finalize(model, self._outlive)

    def _take_over(self, chunk_group: ChunkGroup) -> None:
        """Parameters of the chunk group point to their new homes from here on."""
        self.chunk_groups.append(chunk_group)
        self.grad_factors.connect(chunk_group)
        self.unfinished.connect(chunk_group)
        self.early.connect(chunk_group)
        for contexts in self._unsynced:
            contexts.enter_context(chunk_group.no_sync())
        for m in chunk_group.members:
            m.param._hetero_engine = self  # type: ignore[attr-defined]
            resident = chunk_group.params.is_resident(m.chunk)
            m.param.data = m.part_of(chunk_group.params.flat(m.chunk)) if resident else m.absent
            m.note_change()
            old = self._managed.get(id(m.param))
            if old is not None:
                old.replaced = True
            self._managed[id(m.param)] = m
            self._later.note(m)
            if m.chunk.trainable:
                chunk_group.grads.add_member(m)
                m.grad_ops = self.grad_factors
                with torch.enable_grad():
                    self._hooks.append(GradHook(m, self._check_grad, self._keep_grad))

    def attach(self, hooks: ModelHooks) -> None:
        """Hooks on the model that close() removes."""
        self._model_hooks.append(hooks)

    def follow(
        self, param_groups: Callable[[], Sequence[dict[str, Any]]], hyper_of: HyperOf
    ) -> None:
        """`param_groups` gives the optimizer's groups as they are at the time, `hyper_of` what
        their options mean.
        """
        self._later.follow(param_groups)
        self.early.follow(param_groups, hyper_of)

    @property
    def model(self) -> torch.nn.Module:
        """Whose parameters these are."""
        model = self._model()
        assert model is not None
        return model

    def known(self, param: torch.Tensor) -> ManagedParam | None:
        """What is known of `param`, if it is this engine's."""
        return self._managed.get(id(param))

    def chunk_group_of(self, managed: ManagedParam) -> ChunkGroup:
        """The chunk group that has it."""
        return self.chunk_groups[managed.chunk.chunk_group]

    @property
    def layout(self) -> Layout:
        """The first chunk group's."""
        return self.chunk_groups[0].layout

    @property
    def placement(self) -> Placement:
        """The first chunk group's."""
        return self.chunk_groups[0].placement

    @property
    def dtypes(self) -> Dtypes:
        """The first chunk group's."""
        return self.chunk_groups[0].dtypes

    def find(self, param: torch.Tensor) -> ManagedParam:
        """What is known of `param`. Raises UnmanagedParameterError if it is not this engine's."""
        self._check_open()
        managed = self._managed.get(id(param))
        if managed is None:
            raise UnmanagedParameterError(
                f"a parameter of shape {tuple(param.shape)} is not managed by this engine; pass "
                f"the model that owns it through hetero.initialize()"
            )
        return managed

    def find_all(self, params: Iterable[torch.Tensor]) -> list[ManagedParam]:
        """find() for each of `params` that has elements and can have a gradient."""
        return [self.find(p) for p in params if p.numel() and can_train(p)]

    def name_of(self, param: torch.Tensor) -> str:
        """The parameter's first name in the model."""
        return self.find(param).name

    def share(
        self, values: Mapping[ManagedParam, torch.Tensor], root: int
    ) -> Mapping[ManagedParam, torch.Tensor]:
        """Values that rank `root` of the engine's ranks has for the same parameters."""
        everyone = self.world.everyone
        if not 0 <= root < self.world.size:
            raise ValueError(
                f"modifier_rank must be one of the {self.world.size} ranks, 0 to "
                f"{self.world.size - 1}, not {root}"
            )
        if everyone is None:
            return values
        shared = {managed: value.contiguous() for managed, value in values.items()}
        for managed, value in shared.items():
            everyone.broadcast(value, root, f"changing {managed.name}")
        return shared

    # Gradients

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """loss.backward(**options), with the loss times the loss scale under fp16."""
        self._check_open()
        self._scaled_backward = True
        try:
            (loss.float() * self.loss_scale.value if self.loss_scale.dynamic else loss).backward(
                **options
            )
        finally:
            self._scaled_backward = False

    def _check_grad(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        check_dense(managed, grad)
        self.early.check_gradient(managed)
        self._replanner.tracer.gradient()
        if self.loss_scale.dynamic and not self._scaled_backward:
            raise RuntimeError(
                "fp16 needs a scaled loss: call optimizer.backward(loss) instead of "
                "loss.backward(); or scale the loss yourself, with torch.amp.GradScaler say, and "
                "initialize with initial_loss_scale=None"
            )
        self.grad_factors.adopt([managed])

    def _keep_grad(self, managed: ManagedParam, grad: torch.Tensor, accumulate: bool) -> None:
        self._reading_ahead.begin()
        self.grad_factors.keep(managed, grad, accumulate)
        self.early.arrived(managed, accumulate)
        self.chunk_group_of(managed).grads.write_complete()

    def with_grads(self, params: Iterable[torch.Tensor]) -> list[ManagedParam]:
        """Those of `params` that have gradients, after taking in assigned ones."""
        members = [m for m in self.find_all(params) if m.chunk.trainable]
        self.grad_factors.adopt(members)
        self.grad_factors.settle()
        return [m for m in members if m.has_grad]

    def grad_norm(self, params: Iterable[torch.Tensor]) -> float:
        """The 2-norm of the parameters' gradients, unscaled, as far as they are clipped by now.

        Summed in double per parameter in a fixed order, then over parameters in the model's order:
        the same bits for every placement and chunk size.
        """
        return self.grad_factors.total_norm(self.with_grads(params))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block gradients are added up on each rank and nothing is sent.

        They are kept whole until the first backward outside, within host_memory. With early_updates
        more gradients of the step are known to come, so none is final.
        """
        with ExitStack() as contexts:
            for chunk_group in self.chunk_groups:
                contexts.enter_context(chunk_group.no_sync())
            self._unsynced.append(contexts)
            try:
                yield
            finally:
                self._unsynced.remove(contexts)

    # Steps

    def step(self, param_groups: Sequence[dict[str, Any]], hyper_of: HyperOf) -> None:
        """One optimizer update of all parameters that have gradients.

        Raises HeteroError, before anything is changed, for what would be lost silently: parameters
        moved or unfrozen after initialize(), a step inside gathered().

        Once the step is made, and says so: BudgetError if the process needs more than
        process_memory. Homes that could not move after it are a note; only what could not be undone
        is raised: a read that failed, or a rank.
        """
        self._check_open()
        self._module_hooks.unwind()
        self.unfinished.finish_all()
        self.take_in_unfrozen()
        self.grad_factors.settle(force=True)
        listed = [(group, self.find_all(group["params"])) for group in param_groups]
        for _, all_members in listed:
            for m in all_members:
                self._check_trainable(m)
        self._later.check_left_out(m.param for _, members in listed for m in members)
        groups = [(group, self.with_grads(group["params"])) for group, _ in listed]
        members = [m for _, some in groups for m in some]
        overflow = self.loss_scale.dynamic and self.grad_factors.any_non_finite(members)
        self._meet(members)
        if overflow and self.loss_scale.value <= 1:
            raise NonFiniteError(
                "fp16 gradients overflow although the loss scale is down to 1; use dtype='bf16' or "
                "'fp32', whose range is wider"
            )
        if (members or self.early.half_made) and not overflow:
            self._check_factors(members)
            self._update(groups, hyper_of)
        if members:
            self.loss_scale.update(overflow)
        self._reading_ahead.end_step()
        self._replanner.end_step()

    def meet(self, said: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Until all ranks are here, and nobody reads old values any more; what each said."""
        self.params.settle()
        return self.world.all_gather(said, what)

    def _meet(self, members: Sequence[ManagedParam]) -> None:
        """Until all ranks are about to update, and the same `members`."""
        if self.world.everyone is None:
            return
        flags = torch.zeros(len(self.first_number), dtype=torch.uint8)
        flags[[m.slice.param.index for m in members]] = 1
        for peer, theirs in enumerate(self.meet(flags, "optimizer.step()")):
            if not torch.equal(theirs, flags):
                index = int((theirs != flags).nonzero()[0])
                raise HeteroError(
                    f"{self._name_of(index)} has a gradient on one of "
                    f"{self.world.name} and {self.world.everyone.name(peer)} only at "
                    f"optimizer.step(); clear gradients, and give the optimizer parameters, on all "
                    f"ranks alike"
                )

    def _update(self, groups: Groups, hyper_of: HyperOf) -> None:
        groups = self.early.rest(groups)
        table = hyper_table(groups, hyper_of)
        try:
            self._update_chunk_groups(groups, table)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C
                self.early.interrupted()
            raise
        self.early.finish()
        self.unfinished.end_step()
        if not self.config.late_updates:
            self.unfinished.finish_all()

    def _update_chunk_groups(self, groups: Groups, table: HyperTable) -> None:
        used = {
            m.chunk.chunk_group for _, members in groups for m in members
        } | self.early.chunk_groups
        for chunk_group in (
            chunk_group for number, chunk_group in enumerate(self.chunk_groups) if number in used
        ):
            mine = [
                (g, [m for m in some if self.chunk_group_of(m) is chunk_group])
                for g, some in groups
            ]
            if self.config.late_updates:
                self.unfinished.begin(chunk_group, mine, table, last=True)
            else:
                self._update_chunk_group(chunk_group, mine, table)

    def _update_chunk_group(
        self, chunk_group: ChunkGroup, groups: Groups, table: HyperTable
    ) -> None:
        members = [m for _, some in groups for m in some]
        chunks = {m.chunk.id: m.chunk for m in members}
        # Before the update, so that even an interruption leaves no copy of old values in use.
        for chunk in chunks.values():
            chunk_group.params.invalidate(chunk)
        try:
            with chunk_group.optim_states.lock:
                chunk_group.stepper.run(groups, table)
            chunk_group.params.changed(chunks.values())
        except ValueError:  # nothing was changed, and other ranks wait for what they have
            chunk_group.params.changed(chunks.values())
            raise
        finally:
            for m in members:
                if chunk_group.params.is_resident(m.chunk):
                    # As an in-place update does: a backward over older values then fails.
                    torch.autograd.graph.increment_version(m.param)
                m.note_change()
            for chunk in chunks.values():
                chunk_group.grads.used(chunk)

    def _check_trainable(self, managed: ManagedParam) -> None:
        # (With late updates who uses it now would see its values vanish.)
        kept = managed.uses == 0 or not self.config.late_updates
        in_place = kept and self.params.is_in_place(managed)
        if not (in_place or self.early.is_absent(managed)):
            raise HeteroError(
                f"{managed.name} was moved or converted after hetero.initialize() (model.to(), "
                f".half(), an assignment to .data), or step() runs inside hetero.gathered(); its "
                f"update would be lost"
            )
        if managed.changed_unnoticed:
            raise HeteroError(
                f"{managed.name} was changed in place outside hetero.gathered(..., "
                f"modifier_rank=0); its master would not follow"
            )
        if not managed.chunk.trainable and managed.param.grad is not None:
            raise HeteroError(
                f"{managed.name} was frozen at hetero.initialize() and has a gradient now, but no "
                f"optimizer state; set requires_grad before initialize(), or before a forward "
                f"outside hetero.gathered()"
            )

    # Parameters that come later

    def _before_forward(self) -> None:
        # Ranks may evaluate alone, but train together.
        if torch.is_grad_enabled() and not self._closed:
            self.take_in_unfrozen()

    def take_in_unfrozen(self) -> None:
        """Frozen parameters that need gradients by now, and are the optimizer's, get an optimizer
        state.

        With several ranks all must have unfrozen the same. Raises as extend().
        """
        self._later.take_in_unfrozen()

    def admit(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Takes in parameters of a new param group, with several ranks on all of them.

        Raises as extend(); HeteroError for a parameter that is in use.
        """
        self.early.require_whole("add_param_group()")
        self._later.admit(params)

    def extend(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Gives parameters of the model a place in new chunk groups, made from what the budgets
        have left.

        Frozen ones that need gradients now keep their values (the fp32 master is that of the
        compute dtype) and start with zero moments, at step 0; the old chunk keeps its bytes. New
        ones, of modules that the model has got since, become the compute dtype. All ranks must do
        so.

        Raises BudgetError with the smallest budget that works, HeteroError if ranks differ,
        StoreError and NativeIoError, with nothing changed.
        """
        self._check_open()
        self.unfinished.finish_all()
        for chunk_group in extension(self, self.model, params):
            self._take_over(chunk_group)
        move_rest(self.model, self._managed, self.device)
        for hooks in self._model_hooks:
            hooks.cover(self.model)

    def _check_factors(self, members: Sequence[ManagedParam]) -> None:
        for m in members:
            if not math.isfinite(m.grad_factor):
                raise NonFiniteError(
                    f"the gradient of {m.name} is multiplied by {m.grad_factor}, because it was "
                    f"clipped or unscaled by a number that is not finite; look at the norm that "
                    f"clipping returned, and call optimizer.zero_grad() to go on without this step"
                )

    def synchronize(self) -> None:
        """Until no transfer or update of the last step is under way. Raises what one met.

        With late_updates parameters in RAM have values again. Optimizer states that buffers keep
        for the next step are not written by this.
        """
        self._check_open()
        self.unfinished.finish_all()
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
        self._replanner.set_budget(host_memory, device_memory)

    @property
    def changes(self) -> list[Change]:
        """When homes moved, which, and why."""
        return list(self._replanner.changes)

    @property
    def plans(self) -> list[Plan | None]:
        """One per chunk group, the main one first; None where there was no profile to plan by."""
        return [chunk_group.plan for chunk_group in self.chunk_groups]

    @property
    def traces(self) -> list[Trace]:
        """What different kinds of steps use, and how long they compute; the last is the last."""
        return self._replanner.traces

    @property
    def replanner(self) -> Replanner:
        """Traces of steps, and what was changed because of them."""
        return self._replanner

    def explain(self) -> str:
        """A table for people of where state is and, with a profile, what a step is expected to
        take, and why. Bytes are of this rank. Takes some plans' time."""
        tokens = self.config.expected_tokens or EXPECTED_TOKENS
        return explain_chunk_groups(self.chunk_groups, self.ledger.budget_bytes, tokens)

    # Facts

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far. Between DEVICE and HOST none if they are the same memory."""
        return traffic_of(self.chunk_groups, self.backend)

    @property
    def gather_wait_s(self) -> float:
        """Seconds that compute waited for chunks from other ranks: what prefetch did not hide."""
        ranks = (chunk_group.ranks for chunk_group in self.chunk_groups)
        gatherings = (r.gathering for r in ranks if r is not None)
        return sum(g.wait_s for g in gatherings if g is not None)

    @property
    def device(self) -> torch.device:
        """Where the model computes and its inputs belong."""
        return self.backend.device

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

    def _name_of(self, index: int) -> str:
        return next(m.name for m in self._managed.values() if m.slice.param.index == index)

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
        for m in self._managed.values():
            m.param.data = m.absent
            m.param.grad = None
        self._free()

    def _outlive(self) -> None:
        """The model is gone, or the program ends."""
        # The garbage collector runs in any thread, also in one for whose end _free() waits.
        if in_background():
            threading.Thread(target=self._free, name=f"{THREAD_PREFIX}closing").start()
        else:
            self._free()

    def _leave_ranks(self) -> None:
        if self.world.shard is None or os.getpid() != self._process:
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:  # others see this process end sooner if it does not linger
            self.world.failures.note(-1, f"{self.world.name} ended by {error!r}")
        for chunk_group in self.chunk_groups:
            chunk_group.leave()

    def _free(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child: threads, locks and connections are its parent's
        if not self._closed:
            self._leave_ranks()
        self._closed = True
        for hooks in (*self._hooks, *self._model_hooks):
            hooks.remove()
        for chunk_group in reversed(self.chunk_groups):
            chunk_group.close()
            chunk_group.world.close()
        self.backend.close()
