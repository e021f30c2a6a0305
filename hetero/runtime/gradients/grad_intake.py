"""The way of a gradient from autograd, or from the user, to the chunk group that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.runtime.update_schedule import UpdateSchedule
from hetero.stand_ins.offloaded_tensor import OffloadedTensor
from hetero.state.loss_scale import LossScale
from hetero.state.managed_param import ManagedParam
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
        self._unaveraged = False  # with several ranks: gradients came that are no means yet
        self._is_scaled = False  # in backward(): the loss was scaled
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

        Takes in a gradient that was assigned before. Raises ValueError for a sparse gradient,
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
        self.adopt([managed])

    def keep(self, managed: ManagedParam, grad: torch.Tensor, accumulate: bool) -> None:
        """Keeps what autograd gave, which is times the loss scale; `accumulate`: adds it to what
        is kept. Raises what room for it met.
        """
        self._schedule.begin_backward()
        accumulate = accumulate and managed not in self._zeroed
        self._store(managed, grad, accumulate, self._loss_scale.grad_factor)
        self._schedule.grad_arrived(managed, accumulate, counts=not self._unsynced)
        self._params.chunk_groups[managed.chunk.group_index].grads.slots.write_complete()

    # From the user

    def adopt(self, members: Sequence[ManagedParam]) -> None:
        """Takes gradients that the user assigned to `.grad`, as if backward had given them.

        They are not times the loss scale. Raises ValueError for a sparse one.
        """
        for m in members:
            with torch._C.DisableTorchFunction():  # which a parameter's class is asked by
                grad = m.param.grad
            if grad is None or grad is m.absent_grad:
                continue
            self._params.group(m.chunk).updates.revoke(m.chunk)
            _check_dense(m, grad)
            if isinstance(grad, OffloadedTensor):  # another parameter's
                grad = grad.clone()
            if self._params.group(m.chunk).placement.grad_offload_bytes:
                grad = grad.clone()  # it leaves the device later; the user may change it sooner
            self._store(m, grad, False, 1.0)

    def of(self, members: Sequence[ManagedParam]) -> list[ManagedParam]:
        """Those of `members` that have gradients, after taking in assigned ones.

        Gradients are means over the ranks then, all of which must call this. Raises as adopt().
        """
        trained = [m for m in members if m.chunk.trainable]
        self.adopt(trained)
        self.average()
        return [m for m in trained if m.has_grad]

    def _store(self, m: ManagedParam, grad: torch.Tensor, accumulate: bool, factor: float) -> None:
        chunk_group = self._params.chunk_groups[m.chunk.group_index]
        # Before the gradient: if an exception comes between the two, both still belong together.
        chunk_group.grads.set_factor(m, factor, accumulate)
        self._unaveraged = True
        self._zeroed.pop(m, None)
        if chunk_group.ranks is None:
            chunk_group.grads.add(m, grad, accumulate)
        else:
            chunk_group.ranks.grad_reducer.add(m, grad, accumulate)

    def zero(self, members: Sequence[ManagedParam]) -> None:
        """Makes gradients zero; nothing is written unless they are read, or stepped with."""
        for m in members:
            self._params.group(m.chunk).updates.revoke(m.chunk)
        self._zeroed.update(dict.fromkeys(members))

    def _write_zeros(self) -> None:
        zeroed = [m for m in self._zeroed if m.has_grad]
        # Over ranks zeros would be added to a gradient that is there, and while the gradients are
        # on their way none may be gone.
        for chunk_group in self._params.chunk_groups if zeroed else ():
            if chunk_group.ranks is not None:
                chunk_group.ranks.grad_reducer.end_backward()
        for m in zeroed:
            m.param.grad = torch.zeros_like(m.stand_in)
            self._store(m, m.param.grad, False, 1.0)
        self._zeroed.clear()

    # Over the ranks

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
        if self._zeroed:
            self._write_zeros()
        if self._params.chunk_groups[0].world.everyone is None:
            self._unaveraged = False
            return
        # If one chunk group has something all do: which chunk group has may differ between ranks.
        force = force or self._unaveraged
        # First the one that averages during backward, of which other ranks may be in the middle.
        for chunk_group in sorted(self._params.chunk_groups, key=lambda group: group.reduce_at_end):
            if chunk_group.ranks is not None:
                chunk_group.ranks.grad_reducer.reduce_all(force)
        self._unaveraged = False


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

    @uninterrupted
    def _before(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        self._nothing = grads[0] is None
        if grads[0] is None:  # a function of the user's gave none: autograd accumulates nothing
            return
        self._intake.check(self._managed, grads[0])
        self._accumulating = self._managed.has_grad
        if self._accumulating:
            with torch._C.DisableTorchFunction():  # which a parameter's class is asked by
                self._managed.param.grad = None

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
