"""One step: gradients come in, are clipped and unscaled, and an optimizer updates with them.

Gradients come from autograd, or from the user, and go to the chunk group that keeps them. What is
checked, and agreed by all ranks, comes before a step changes anything. Each rank updates its own
shards, so ranks that differ would train the shards differently. When all have come and are the
same, no rank reads values that are about to change. (An update that began during backward is a
guess of its rank alone: no other one reads its values before this.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup, Shared
from hetero.chunk_groups.update_tasks import Groups, LrScaleOf, numbers_of
from hetero.ranks.communicator import Communicator
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.modules.param_registry import AddsParams, ParamRegistry
from hetero.runtime.step_watch import StepTracer
from hetero.runtime.update_schedule import OptimizerView, UpdateSchedule
from hetero.stand_ins.offloaded_tensor import OffloadedTensor
from hetero.state.grads import Grads, LossScale
from hetero.state.managed_param import ManagedParam, ParamState
from offload.errors import HeteroError, NonFiniteError
from offload.interrupts import uninterrupted


class GradIntake:
    """Takes gradients in: GradHook -> GradIntake -> Grads, or with several ranks GradReducer.

    Grads keeps this rank's shard of the gradients of a chunk group; GradReducer first averages
    whole gradients over the ranks. Then the update schedule learns that a gradient came.
    """

    def __init__(
        self,
        params: ParamRegistry,
        loss_scale: LossScale,
        schedule: UpdateSchedule,
        note_backward: Callable[[], object],
    ) -> None:
        """`note_backward` is called when autograd gives a gradient."""
        self._params = params
        self._loss_scale = loss_scale
        self._schedule = schedule
        self._note_backward = note_backward
        self._unsynced: list[ExitStack] = []  # what the open no_sync() blocks have entered
        self.is_unaveraged = False  # with several ranks: gradients came that are no means yet
        self._is_scaled = False  # in backward(): the loss was scaled
        self._backward = -1  # torch's number of the backward whose gradients came last
        # Gradients that are zero, whatever is kept: most get another one before anybody looks.
        self._zeroed: dict[ManagedParam, None] = {}  # in the order of the loop, as on other ranks

    # From autograd

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """loss.backward(**options), with the loss times the loss scale under fp16."""
        self._is_scaled = True
        try:
            if self._loss_scale.dynamic:
                loss = loss.float() * self._loss_scale.value
            loss.backward(**options)
        finally:
            self._is_scaled = False

    def check(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        """Autograd is about to add `grad` to the parameter's gradient.

        Takes in gradients that were assigned before. Raises ValueError for a sparse gradient,
        RuntimeError under fp16 for an unscaled one.
        """
        _check_dense(managed, grad)
        self._params.chunk_groups[managed.chunk.group_index].updates.revoke(managed.chunk)
        self._note_backward()
        if self._loss_scale.dynamic and not self._is_scaled:
            raise RuntimeError(
                "fp16 needs a scaled loss: call optimizer.backward(loss) instead of "
                "loss.backward(); or scale the loss yourself, with torch.amp.GradScaler say, and "
                "initialize with initial_loss_scale=None"
            )
        backward = torch._C._current_graph_task_id()
        if self._is_averaged and backward != self._backward:
            self._adopt_all()
        self._backward = backward
        self.adopt([managed])

    def keep(self, managed: ManagedParam, grad: torch.Tensor, accumulate: bool) -> None:
        """Keeps what autograd gave, which is times the loss scale; `accumulate`: adds it to what
        is kept. Raises what room for it met.
        """
        self._schedule.begin_backward()
        adds = accumulate and managed not in self._zeroed
        self._store(managed, grad, accumulate, self._loss_scale.grad_factor)
        self._schedule.grad_arrived(managed, adds, counts=not self._unsynced)
        self._params.chunk_groups[managed.chunk.group_index].grads.slots.write_complete()

    # From the user

    def adopt(self, members: Sequence[ManagedParam]) -> None:
        """Takes gradients that the user assigned to `.grad`, as if backward had given them.

        They are not times the loss scale. Raises ValueError for a sparse one.
        """
        assigned: dict[ManagedParam, torch.Tensor] = {}
        with torch._C.DisableTorchFunction():  # which a parameter's class is asked by
            for m in members:
                grad = m.param.grad
                if grad is not None and grad is not m.absent_grad:
                    _check_dense(m, grad)
                    assigned[m] = grad
            # All are taken before one is kept, for which a mean of other ranks' may come first.
            for m in assigned:
                m.begin_grad()
                m.param.grad = None
        try:
            if self._is_averaged:
                for index in dict.fromkeys(m.chunk.group_index for m in assigned):
                    ranks = self._params.chunk_groups[index].ranks
                    assert ranks is not None
                    ranks.grad_reducer.begin_assigned()
            while assigned:
                m = next(iter(assigned))
                # Beside what other ranks have assigned and sent by now.
                self.replace(m, assigned[m], accumulate=m.has_grad)
                del assigned[m]
        except BaseException:
            with torch._C.DisableTorchFunction():
                for m, grad in assigned.items():
                    m.param.grad = grad
            raise

    def _adopt_all(self) -> None:
        """Takes all in, before other ranks' gradients of the same parameters come."""
        groups = self._params.chunk_groups
        self.adopt([m for group in groups for m in group.members if m.chunk.trainable])

    def replace(self, m: ManagedParam, grad: torch.Tensor, accumulate: bool = False) -> None:
        """Keeps `grad`, dense and not times the loss scale, instead of what is kept, if anything;
        `accumulate`: adds it to that.

        (It does not pass through `.grad`, which may be of another dtype.)
        """
        if isinstance(grad, OffloadedTensor):  # another parameter's
            grad = grad.clone()
        factor = 1.0
        if self._is_averaged and self._loss_scale.dynamic:
            # As the gradients that other ranks' backward gives, with which it goes into one mean.
            grad, factor = grad.float() * self._loss_scale.value, self._loss_scale.grad_factor
        chunk_group = self._params.group(m.chunk)
        if chunk_group.placement.grad_offload_bytes:
            # It leaves the device later, and the user may change it sooner. As large as backward's:
            # of fp16 it was read in fp32.
            kept = grad.dtype if accumulate else chunk_group.dtypes.torch_grad
            grad = grad.to(kept, copy=True)
        self._store(m, grad, accumulate, factor)

    def of(self, members: Sequence[ManagedParam], force: bool = False) -> list[ManagedParam]:
        """Those of `members` that have gradients, after taking in assigned ones.

        Gradients are means over the ranks then, all of which must call this; `force`: perhaps one
        of them has got new ones. Raises as adopt().
        """
        trained = [m for m in members if m.chunk.trainable]
        self.adopt(trained)
        self.average(force)
        return [m for m in trained if m.has_grad]

    def _store(self, m: ManagedParam, grad: torch.Tensor, accumulate: bool, factor: float) -> None:
        chunk_group = self._params.chunk_groups[m.chunk.group_index]
        if chunk_group.ranks is None and m in self._zeroed:
            accumulate = False
        # Before the gradient: if an exception comes between the two, both still belong together.
        chunk_group.grads.set_factor(m, factor, accumulate)
        self.is_unaveraged = True
        self._zeroed.pop(m, None)
        if chunk_group.ranks is None:
            chunk_group.grads.add(m, grad, accumulate)
        else:
            chunk_group.ranks.grad_reducer.add(m, grad, accumulate)

    def zero(self, members: Sequence[ManagedParam]) -> None:
        """Makes gradients zero; nothing is written unless they are read, or stepped with."""
        for m in members:
            chunk_group = self._params.group(m.chunk)
            chunk_group.updates.revoke(m.chunk)
            m.grad_factor, m.grad_limits = self._loss_scale.grad_factor, None
            if chunk_group.ranks is not None:
                chunk_group.ranks.grad_reducer.zero(m)
        self._zeroed.update(dict.fromkeys(members))

    def _write_zeros(self) -> None:
        """Where nothing has come since; gradients are means."""
        for m in self._zeroed:
            chunk_group = self._params.group(m.chunk)
            if m.has_grad and chunk_group.ranks is not None:
                chunk_group.ranks.grad_reducer.means.write_zeros(m)
            elif m.has_grad:
                chunk_group.grads.change(m, lambda kept: kept.zero_())
        self._zeroed.clear()

    # Over the ranks

    @property
    def _is_averaged(self) -> bool:
        """Whether gradients are averaged over several ranks."""
        return self._params.chunk_groups[0].world.everyone is not None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block gradients are added up on each rank and nothing is sent.

        They are kept whole until the first backward outside, within host_memory. More gradients of
        the step are known to come, so none is final: no update is submitted.
        """
        with ExitStack() as contexts:
            for chunk_group in self._params.chunk_groups:
                contexts.enter_context(chunk_group.no_sync())
            self._unsynced.append(contexts)
            try:
                yield
            finally:
                self._unsynced.remove(contexts)

    def take_over(self, chunk_group: ChunkGroup) -> None:
        """The chunk group has come, perhaps inside no_sync()."""
        for contexts in self._unsynced:
            contexts.enter_context(chunk_group.no_sync())

    def average(self, force: bool = False) -> None:
        """Until gradients are means over the ranks; `force`: also if none has come here.

        All ranks must call it. Raises PeerError.
        """
        if not self._is_averaged:
            self._write_zeros()
            self.is_unaveraged = False
            return
        # If one chunk group has something all do: which chunk group has may differ between ranks.
        force = force or self.is_unaveraged or bool(self._zeroed)
        if force:
            self._adopt_all()
        # First the one that averages during backward, of which other ranks may be in the middle.
        for chunk_group in sorted(
            self._params.chunk_groups, key=lambda group: group.plan.spec.reduce_at_end
        ):
            if chunk_group.ranks is not None:
                chunk_group.ranks.grad_reducer.reduce_all(force)
        self._write_zeros()
        self.is_unaveraged = False


def _check_dense(managed: ManagedParam, grad: torch.Tensor) -> None:
    if grad.layout is not torch.strided:
        raise ValueError(
            f"{managed.name} got a {grad.layout} gradient; only dense gradients are supported: "
            f"use sparse=False"
        )


class GradHook:
    """Hands each gradient of a parameter to GradIntake.keep().

    `.grad` holds the placeholder if there is a gradient already; it is taken away only when
    autograd is about to accumulate (torch.autograd.grad() does not), and put back if keeping
    fails. GradIntake.check() may refuse by raising.
    """

    def __init__(self, managed: ManagedParam, intake: GradIntake) -> None:
        self._managed = managed
        self._intake = intake
        self._nothing = False
        self._accumulating = False
        param = managed.param
        # The node that accumulates; its hooks last as long as it is referred to.
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            node = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._node: torch.autograd.graph.Node | None = node
        self._handles = [
            node.register_prehook(self._before),  # type: ignore[union-attr]
            param.register_post_accumulate_grad_hook(self._after),
        ]
        # First, so that hooks of the user's that are older see the sum of all micro-batches, too.
        with torch._C.DisableTorchFunction():
            hooks: Any = param._post_accumulate_grad_hooks
        for older in list(hooks)[:-1]:
            hooks[older] = hooks.pop(older)

    def _before(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        try:
            self._take_away(grads[0])
        except BaseException:  # Ctrl-C is delivered at its end
            if self._accumulating:
                self._managed.hold_grad()
            raise

    @uninterrupted
    def _take_away(self, grad: torch.Tensor | None) -> None:
        self._nothing, self._accumulating = grad is None, False
        if grad is None:  # a function of the user's gave none: autograd accumulates nothing
            return
        self._intake.check(self._managed, grad)
        self._accumulating = self._managed.has_grad
        if self._accumulating:
            with torch._C.DisableTorchFunction():  # which a parameter's class is asked by
                self._managed.param.grad = None
        else:
            self._managed.begin_grad()

    @uninterrupted
    def _after(self, param: torch.Tensor) -> None:
        if self._nothing:
            return
        with torch._C.DisableTorchFunction():
            grad, param.grad = param.grad, None
        assert grad is not None
        try:
            self._intake.keep(self._managed, grad, self._accumulating)
        except BaseException:
            if self._accumulating:
                self._managed.hold_grad()
            raise

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        # The node owns the parameter in C++, where the garbage collector does not see the cycle.
        self._node = None


_READ_NUMEL = 4 << 20  # of gradients that ranks exchange at a time, in memory that nobody counts
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_

Members = Sequence[ManagedParam]


class GradFactors:
    """What may be done to gradients between backward and step().

    A parameter's gradient is what its chunk group keeps times `ManagedParam.grad_factor`. Scaling a
    gradient changes the factor only: the update multiplies by it in fp32. The factor belongs to
    that gradient, so it ends when `.grad` is cleared. Before another micro-batch is added, the
    gradient that is kept is multiplied by it in the grad dtype, as torch does at once.

    With several ranks all must make the same calls: norms are of means over the ranks, whole.
    """

    def __init__(
        self,
        params: ParamRegistry,
        intake: GradIntake,
        shared: Shared,
        shard: Communicator | None,
        optimizer_of: Callable[[torch.Tensor], object],
        step_left_out: Callable[[], object],
    ) -> None:
        """`shard`: the ranks that share gradients, if there are several. `optimizer_of` says which
        optimizer has a parameter. `step_left_out` is called when a GradScaler is about to leave out
        a step, before the recordings of the order of uses end.
        """
        self._params = params
        self._intake = intake
        self._loss_scale = shared.loss_scale
        self._shard = shard
        self._optimizer_of = optimizer_of
        self._step_left_out = step_left_out
        # With several ranks: sums of squares of whole gradients, the same on all ranks, and after
        # how many changes of means they were taken.
        self._whole_sums: dict[ManagedParam, float] = {}
        self._sums_at = -1  # GradReducer.changes of all chunk groups when they were taken
        # Gradients that other ranks alone have and that came while torch had listed the others.
        self._unlisted: set[ManagedParam] = set()

    def _grads(self, managed: ManagedParam) -> Grads:
        return self._params.group(managed.chunk).grads

    # Facts, per parameter

    def sums_of_squares(self, members: Members) -> list[float]:
        """Of each gradient, in double, in a fixed order: the same bits for every placement."""
        self._average_for(members)
        if self._shard is None:
            return [self._grads(m).sum_of_squares(m) * m.grad_factor**2 for m in members]
        chunk_groups = self._params.chunk_groups
        changes = sum(g.ranks.grad_reducer.changes for g in chunk_groups if g.ranks is not None)
        if changes != self._sums_at:
            self._whole_sums.clear()
            self._sums_at = changes
        if any(m not in self._whole_sums for m in members):
            trained = (m for group in chunk_groups for m in group.members if m.chunk.trainable)
            all_members = [m for m in trained if m.has_grad]
            sums = self._over_ranks([self._grads(m).sum_of_squares(m) for m in all_members])
            self._whole_sums.update(zip(all_members, sums.sum(dim=0).tolist(), strict=True))
        return [self._whole_sums[m] * m.grad_factor**2 for m in members]

    def _average_for(self, members: Members) -> None:
        """Makes means, of which those of `members` are wanted.

        torch's clip_grad_norm_() lists the gradients that there are before it asks for a norm, and
        again before it clips; GradScaler.unscale_() lists them once.
        """
        absent: list[ManagedParam] = []
        if self._shard is not None and self._intake.is_unaveraged:
            groups = self._params.chunk_groups
            absent = [m for group in groups for m in group.members if not m.has_grad]
            self._unlisted.clear()
        self._intake.average()
        self._unlisted.update(m for m in absent if m.has_grad)
        self._unlisted.difference_update(members)

    def _over_ranks(self, values: Sequence[float]) -> torch.Tensor:
        """Every rank's values, of which each has its shards', as rows."""
        mine = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self._shard is None:
            return mine.unsqueeze(0)
        return self._shard.all_gather(mine, "the gradients' norms")

    def any_non_finite(self, members: Members) -> bool:
        """Whether an element is infinite or NaN."""
        return not all(map(math.isfinite, self.sums_of_squares(members)))

    def largest(self, members: Members) -> list[float]:
        """The largest magnitude in each gradient; NaN if it has a NaN."""
        self._average_for(members)
        over_ranks = self._over_ranks([self._grads(m).largest(m) for m in members])
        largest = over_ranks.amax(dim=0).tolist()
        return [one * abs(m.grad_factor) for one, m in zip(largest, members, strict=True)]

    def read(self, members: Members) -> list[torch.Tensor]:
        """Copies of gradients, as the step will use them: whole, in fp32."""
        self._intake.average()
        wholes = (whole for some in _read_together(members) for whole in self._wholes(some))
        return [
            whole.view(m.param.shape).to(m.param.device).float().mul_(m.grad_factor)
            for m, whole in zip(members, wholes, strict=True)
        ]

    def _wholes(self, members: Members) -> list[torch.Tensor]:
        """Copies of the gradients that are kept, flat, brought together from all ranks."""
        mine = [self._grads(m).read(m) for m in members]
        shard = self._shard
        if shard is None:
            return mine
        wholes = [
            torch.empty(m.numel, dtype=part.dtype, device="cpu")
            for m, part in zip(members, mine, strict=True)
        ]
        places = [
            [m.in_shard(self._params.group(m.chunk).layout, rank)[1] for m in members]
            for rank in range(shard.size)
        ]
        parts = [[w[place] for w, place in zip(wholes, some, strict=True)] for some in places]
        names = ", ".join(m.name for m in members)
        shard.exchange([mine] * shard.size, parts, f"reading the gradient of {names}")
        return wholes

    def norms(self, members: Members, norm_type: float) -> list[float]:
        """The norm of each gradient; `norm_type` is 2 or inf."""
        if norm_type == 2:
            return [math.sqrt(total) for total in self.sums_of_squares(members)]
        assert norm_type == math.inf
        return self.largest(members)

    def total_norm(self, members: Members, norm_type: float = 2.0) -> float:
        """The norm of all of them together; each parameter counts once."""
        members = in_model_order(members)
        if norm_type == 2:
            return math.sqrt(sum(self.sums_of_squares(members)))
        norms = self.norms(members, norm_type)
        return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)

    # Changes

    def clip_norm(
        self, members: Members, max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> float:
        """Makes the total norm at most `max_norm`; returns what it was.

        Raises NonFiniteError (with `error_if_nonfinite`), with nothing changed.
        """
        norm = self.total_norm(members, norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {norm}")
        factor = max_norm / (norm + _CLIP_EPS)
        self.multiply(in_model_order(members), 1.0 if factor > 1 else factor)  # NaN stays NaN
        return norm

    def multiply(self, members: Members, factor: float) -> None:
        """Multiplies each gradient by `factor`.

        Raises HeteroError if that is no part of the norm that clipping has taken.
        """
        self._intake.average()
        for m in members:
            if m in self._unlisted:
                raise HeteroError(
                    f"the gradient of {m.name}, which other ranks alone have, came while "
                    f"clip_grad_norm_() took the norm of the others; clip by "
                    f"hetero.clip_grad_norm_(), and call optimizer.zero_grad() to continue without "
                    f"this step"
                )
        for m in members:
            m.grad_factor *= factor

    def clamp(self, members: Members, low: float | None, high: float | None) -> None:
        """Limits each element to [low, high], in the grad dtype.

        Where the loss is scaled by hetero, a gradient with an overflow stays as it is, because
        its step is going to be skipped.
        """
        self._intake.average()
        if self._loss_scale.dynamic:
            sums = self.sums_of_squares(members)
            members = [m for m, total in zip(members, sums, strict=True) if math.isfinite(total)]
        for m in sorted(members, key=lambda m: (m.chunk.group_index, m.chunk.id, m.slice.offset)):
            if not 0 < m.grad_factor < math.inf:
                factor, m.grad_factor = m.grad_factor, 1.0
                self._change(m, lambda kept, factor=factor: kept.mul_(factor))  # type: ignore[misc]
            # The numbers of the grad dtype nearest to the bounds.
            largest = torch.finfo(self._params.group(m.chunk).dtypes.torch_grad).max
            bounds = [
                None if b is None else min(max(b / m.grad_factor, -largest), largest)
                for b in (low, high)
            ]
            self._change(m, lambda kept, bounds=bounds: kept.clamp_(*bounds))  # type: ignore[misc]
            m.grad_limits = low, high

    def unscale(self, members: Members, factor: float) -> bool:
        """GradScaler's: multiplies by `factor`; whether an element is infinite or NaN.

        Also those that other ranks alone have, of the same optimizers. Raises HeteroError if hetero
        scales the loss too.
        """
        if self._loss_scale.dynamic:
            raise HeteroError(
                "a GradScaler and hetero both scale the loss (fp16); leave one out: "
                "hetero.initialize(..., initial_loss_scale=None) leaves it to the GradScaler"
            )
        self._average_for(members)
        optimizers = {id(self._optimizer_of(m.param)) for m in members}
        late = [m for m in self._unlisted if id(self._optimizer_of(m.param)) in optimizers]
        self._unlisted.clear()
        members = in_model_order([*members, *late])
        self.multiply(members, factor)
        overflow = self.any_non_finite(members)
        if overflow:  # GradScaler is going to leave out the step, which would say that it is over
            self._step_left_out()
            for chunk_group in self._params.chunk_groups:
                chunk_group.order.end_step()
        return overflow

    def replace(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        """Keeps `grad`, whole, instead of the gradient."""
        self._whole_sums.clear()
        self._intake.replace(managed, grad)

    def _change(self, m: ManagedParam, change: Callable[[torch.Tensor], object]) -> None:
        self._whole_sums.clear()
        self._grads(m).change(m, change)

    def zero(self, members: Members) -> None:
        """Makes the gradients zero; what comes next is the first of its sum."""
        self._whole_sums.clear()
        self._intake.zero(members)


def _read_together(members: Members) -> Iterator[list[ManagedParam]]:
    """The members in their order, of at most _READ_NUMEL elements together, or one."""
    some: list[ManagedParam] = []
    for m in members:
        if some and sum(each.numel for each in some) + m.numel > _READ_NUMEL:
            yield some
            some = []
        some.append(m)
    if some:
        yield some


def in_model_order(members: Members) -> list[ManagedParam]:
    """Each of them once, in the model's order, in which sums are taken."""
    return sorted(dict.fromkeys(members), key=lambda m: m.slice.param.index)


class OptimizerSteps:
    """Makes the steps of an engine's optimizers: takes in gradients, and has parameters updated.

    Attributes:
        optimizers: as initialize() was given them.
        schedule: when chunks are updated.
        grad_intake, grad_factors: what comes from backward, and what is done to it.
    """

    def __init__(
        self,
        params: ParamRegistry,
        shared: Shared,
        shard: Communicator | None,
        optimizers: Sequence[OptimizerView],
        tracer: Callable[[], StepTracer],
    ) -> None:
        """No step was made. `shard`: the ranks that share gradients. `tracer` gives what follows
        backwards, which exists by the first one."""
        self._params, self._loss_scale = params, shared.loss_scale
        self.optimizers = optimizers
        self.schedule = UpdateSchedule(params, shared.config, shared.loss_scale, optimizers)
        self.grad_intake = GradIntake(
            params, shared.loss_scale, self.schedule, lambda: tracer().gradient()
        )
        self.grad_factors = GradFactors(
            params,
            self.grad_intake,
            shared,
            shard,
            self.optimizer_of,
            lambda: tracer().forget(),
        )
        self._added_params: AddsParams | None = None

    def attach(self, added_params: AddsParams) -> None:
        """Gets what gives parameters a place later; called once."""
        self._added_params = added_params

    @property
    def added_params(self) -> AddsParams:
        """What gives parameters a place after initialize()."""
        assert self._added_params is not None
        return self._added_params

    def optimizer_of(self, param: torch.Tensor) -> OptimizerView | None:
        """The optimizer that has the parameter; None if none has."""
        for optimizer in self.optimizers:
            if any(p is param for group in optimizer.param_groups() for p in group["params"]):
                return optimizer
        return None

    def begin(self) -> None:
        """All updates are made, all parameters have a place, and all gradients are means."""
        self.schedule.wait_all()
        self.added_params.take_in_unfrozen()
        self.grad_intake.average(force=True)

    def make(
        self,
        listed: Sequence[tuple[dict[str, Any], list[ManagedParam]]],
        optimizer: OptimizerView,
    ) -> None:
        """Makes one update, as Engine.step() says, of the parameters in `listed`, the optimizer's
        param groups, that have gradients; begin() was called."""
        managed = self._params.managed.values()
        given = dict.fromkeys(m for _, members in listed for m in members)
        _check_left_out(managed, self.optimizer_of)
        self._params.take_in_written(given)
        for m in given:
            _check_updatable(m)
        groups = [(options, self.grad_intake.of(members)) for options, members in listed]
        members = [m for _, some in groups for m in some]
        overflow = self._loss_scale.dynamic and self.grad_factors.any_non_finite(members)
        self._params.finish_transfers("optimizer.step()", ends_step=True)
        world = self._params.chunk_groups[0].world
        _meet_with_same(groups, managed, optimizer.options, optimizer.lr_scale_of, world)
        if overflow and self._loss_scale.value <= 1:
            raise NonFiniteError(
                "fp16 gradients overflow although the loss scale is down to 1; use dtype='bf16' or "
                "'fp32', whose range is wider"
            )
        if members and not overflow:
            _check_factors(members)
            self.schedule.step(groups, optimizer)
        else:
            self.schedule.revoke_all()
        if members:
            self._loss_scale.update(overflow)
        self.schedule.end_step()

    def pause(self) -> None:
        """Until no update is under way, so that homes can move."""
        self.schedule.revoke_all()
        self.schedule.wait_all()
        self.schedule.wait_copied()
        for chunk_group in self._params.chunk_groups:
            chunk_group.updates.versions.free_all()
        self._params.take_in_written(self._params.managed.values())

    def meet(self, what: str) -> None:
        """Waits for all ranks, so that none of them still reads values that are about to change.

        Raises PeerError if a rank does not come; `what` says what they are about to do.
        """
        self.schedule.wait_all()
        self._params.finish_transfers(what)
        self._params.chunk_groups[0].world.meet(what)


def _check_left_out(
    managed: Iterable[ManagedParam], optimized: Callable[[torch.Tensor], object]
) -> None:
    """Raises HeteroError for a gradient of what was frozen and is in no param group.

    `optimized` says which optimizer has a parameter, or None.
    """
    for m in managed:
        frozen = m.was_frozen and not m.chunk.trainable
        if frozen and m.param.grad is not None and optimized(m.param) is None:
            raise HeteroError(
                f"{m.name} was frozen at hetero.initialize() and has a gradient now, but no "
                f"param group has it; add it with optimizer.add_param_group()"
            )


def _check_updatable(managed: ManagedParam) -> None:
    """Raises HeteroError if an update of the parameter, or a change of it, would be lost."""
    is_home = managed.state.is_home or managed.state is ParamState.UPDATING
    if not is_home or managed.is_moved:
        raise HeteroError(
            f"{managed.name} was moved or converted after hetero.initialize() (model.to(), "
            f".half(), an assignment to .data), or step() runs inside hetero.gathered(); its "
            f"update would be lost"
        )
    if managed.writes.are_unnoticed:
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


def _meet_with_same(
    groups: Groups,
    managed: Iterable[ManagedParam],
    options: Sequence[str],
    lr_scale_of: LrScaleOf,
    world: ProcessGroups,
) -> None:
    """Until all ranks are about to make the same update, each of its own shards.

    That is one of the same parameters in the same param groups, with gradients that are multiplied
    by the same factors, and the same `options` and factors of the learning rate, bit for bit.
    Raises HeteroError on all ranks for the first difference, with nothing changed.
    """
    if world.everyone is None:
        return
    facts = {m.name: "without a gradient" for m in managed}
    for number, (group, members) in enumerate(groups):
        for m in members:
            facts[m.name] = (
                f"in param group {number} with its gradient times {m.grad_factor!r} and its "
                f"learning rate times {lr_scale_of(group, m.param.shape)!r}"
            )
            if m.grad_limits is not None:
                facts[m.name] += ", clamped between {} and {}".format(*m.grad_limits)
    for number, (group, _) in enumerate(groups):
        for name in options:
            numbers = ", ".join(map(repr, numbers_of(group.get(name))))
            facts[f"{name} of param group {number}"] = numbers
    world.require_equal(
        facts,
        "the updates of optimizer.step()",
        "clear, clip, scale and unscale gradients, set options and step schedulers (with a metric "
        "that is averaged over the ranks) on all ranks alike; where ranks use different "
        "parameters, clip by hetero.clip_grad_norm_() or hetero.clip_grad_value_()",
    )


def _check_factors(members: Iterable[ManagedParam]) -> None:
    """Raises NonFiniteError for a gradient that would be multiplied by what is not finite."""
    for m in members:
        if not math.isfinite(m.grad_factor):
            raise NonFiniteError(
                f"the gradient of {m.name} is multiplied by {m.grad_factor}, because it was "
                f"clipped or unscaled by a number that is not finite; look at the norm that "
                f"clipping returned, and call optimizer.zero_grad() to continue without this step"
            )
