"""When each chunk is updated, and who waits for it: one mechanism, two policies.

A chunk's update is submitted by step(), or during backward as soon as its gradients are final; and
step() waits for it, or the next use of the chunk does. The option overlap_updates chooses. Each
chunk group's ChunkUpdates has the states, and makes those wait who need a chunk's memory.

What is submitted during backward is *speculative*: it is made with a guess of what step() will say,
which is the options of the param groups as they are now, and the factor that clipping and unscaling
gave gradients in recent steps. Such an update leaves what it reads. step() compares: it keeps the
update, or takes it back and makes another one. Before anybody uses a value in between, or changes a
gradient, the chunk's update is taken back. So training has the same bits as without, and nobody
sees a difference but in time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunk_groups.update_tasks import Groups, HyperOf, HyperTable, LrScaleOf
from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk
from hetero.config import Config
from hetero.overlap import OverlapUpdates
from hetero.runtime.modules.call_stack import inside_another_backward
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.state.chunk_updates import Speculative
from hetero.state.grads import LossScale
from hetero.state.managed_param import ManagedParam
from offload.timeline import marked


@dataclass(frozen=True)
class OptimizerView:
    """The optimizer's param groups, and what their options mean; it does not keep it alive.

    `options` are the names of those that updates are made with; users may note others. `dtypes`
    are of what it trains.
    """

    dtypes: Dtypes

    param_groups: Callable[[], Sequence[dict[str, Any]]]
    hyper_of: HyperOf
    lr_scale_of: LrScaleOf
    options: Sequence[str]

    def hyper_table(self, groups: Groups, factor: float = 1.0) -> HyperTable:
        """All hyper-parameters that an update of `groups` takes, whose gradients are going to be
        multiplied by `factor` more. Raises ValueError."""
        return HyperTable(groups, self.hyper_of, self.lr_scale_of, factor)


class UpdateSchedule:
    """Submits the updates of all chunk groups and waits for them."""

    def __init__(
        self,
        params: ParamRegistry,
        config: Config,
        loss_scale: LossScale,
        optimizers: Sequence[OptimizerView],
    ) -> None:
        self._params = params
        self.overlap = config.debugging.overlap_updates
        self._loss_scale = loss_scale
        self._counts = GradCounts()
        self._optimizers = optimizers
        self._prediction = FactorPrediction(always=self.overlap is not OverlapUpdates.AUTO)
        self._guess: float | None = None  # of this step's factor
        self._reads_ahead = config.debugging.prefetch
        self._in_backward = False  # a gradient has come in this step
        self._group_of: dict[int, int] = {}  # by id(param): index of its param group

    @property
    def speculates(self) -> bool:
        """Whether updates are made during backward, going by recent steps, if there are any."""
        known = self._prediction.guess() is not None or not self._prediction.has_steps
        return self.overlap.in_backward and known

    # During backward

    def begin_backward(self) -> None:
        """A gradient comes: what step() needs first is read while backward runs.

        Once a step. Not before backward: reading would compete with forward, for a step that may
        not come. Not in a later backward of the step: what was read once stays.
        """
        if self._in_backward:
            return
        self._in_backward = True
        # (Which of several optimizers is going to make its step is not known.)
        speculates = self.overlap.in_backward and len(self._optimizers) == 1
        self._guess = self._prediction.guess() if speculates else None
        if not self._reads_ahead:
            return
        for chunk_group in self._params.chunk_groups:
            lock = chunk_group.optim_states.lock
            if lock.acquire(blocking=False):  # else the buffers are used to read optimizer states
                try:
                    with suppress(RuntimeError, OSError):  # a failed pipeline says so to step()
                        chunk_group.update_tasks.read_ahead()
                finally:
                    lock.release()

    def grad_arrived(self, managed: ManagedParam, added: bool, counts: bool) -> None:
        """A gradient is kept (GradCounts.note()). Submits the updates that can be made now."""
        if not self.overlap.in_backward:
            return
        self._counts.note(managed, added, counts)
        if not counts or self._guess is None:
            return
        chunk_group = self._params.chunk_groups[managed.chunk.group_index]
        arrived = [managed.chunk]
        if chunk_group.ranks is not None:
            arrived = chunk_group.ranks.grad_reducer.means.take_new()
        chunk_group.params.updates.finish(arrived)  # of the last step
        for chunk in arrived:
            self._note_final(chunk)
        final = [chunk for group in self._params.chunk_groups for chunk in group.updates.final]
        if final and not inside_another_backward():
            for chunk in final:
                # (Gradients may have been cleared since, or another one have come.)
                if chunk in arrived or self._note_final(chunk):
                    chunk_group = self._params.group(chunk)
                    if not chunk_group.grads.has_arrived(chunk):
                        return  # it is on its way from the device
                    if not chunk_group.updates.versions.snapshots.may_change(chunk):
                        return  # a save, or the last step's commit, goes on
                    self._speculate(chunk, self._guess)

    def _note_final(self, chunk: Chunk) -> bool:
        chunk_group = self._params.group(chunk)
        final = self._counts.are_final(chunk_group.grads.members(chunk))
        if chunk_group.ranks is not None:
            final = final and chunk_group.ranks.grad_reducer.means.has_mean(chunk)
        chunk_group.updates.set_final(chunk, final)
        return final

    @marked("hetero::update")
    def _speculate(self, chunk: Chunk, factor: float) -> None:
        """Submits a speculative update of the chunk; leaves it to step() if that is impossible."""
        chunk_group = self._params.group(chunk)
        updates = chunk_group.updates
        updates.set_final(chunk, False)
        members = chunk_group.grads.members(chunk)
        groups = self._grouped(members)
        if groups is None or chunk_group.grads.has_lost(chunk) or not all(map(is_free, members)):
            return
        if not chunk_group.update_tasks.can_speculate or not updates.versions.can_speculate(
            updates.chunks[chunk.id]
        ):
            return
        try:
            table = self._optimizers[0].hyper_table(groups, factor)
        except ValueError:
            return
        if not chunk_group.params.updates.begin_speculation(chunk, members):
            return
        update = chunk_group.update_tasks.prepare(groups, table, speculative=True)
        speculative = Speculative(members, table.hypers_of(members))
        with (
            chunk_group.optim_states.lock,
            updates.speculating(chunk, speculative) as nobody_reads,
        ):
            if nobody_reads:
                chunk_group.update_tasks.submit(update, last=False)

    def _grouped(self, members: Iterable[ManagedParam]) -> Groups | None:
        """The param groups, with `members` alone; None if one is in no group."""
        (optimizer,) = self._optimizers
        groups: Groups = [(group, []) for group in optimizer.param_groups()]
        if not self._group_of:
            self._group_of = {
                id(p): index for index, (group, _) in enumerate(groups) for p in group["params"]
            }
        for m in members:
            index = self._group_of.get(id(m.param))
            if index is None:
                return None
            groups[index][1].append(m)
        return groups

    def revoke_all(self) -> None:
        """Takes all speculative updates back. Raises what an update met."""
        for chunk_group in self._params.chunk_groups:
            chunk_group.updates.revoke_all()

    # At step()

    @marked("hetero::update")
    def step(self, groups: Groups, optimizer: OptimizerView) -> None:
        """Updates the parameters in `groups`, which are those of `optimizer` that have gradients.

        Raises ValueError for hyper-parameters that make no sense, HeteroError for a gradient that
        was lost, with nothing changed.
        """
        table = optimizer.hyper_table(groups)
        members = [m for _, some in groups for m in some]
        chunk_groups = self._params.chunk_groups
        for chunk in {(m.chunk.group_index, m.chunk.id): m.chunk for m in members}.values():
            updates = chunk_groups[chunk.group_index].updates
            updates.versions.leave_committed(updates.chunks[chunk.id])
        for m in members:
            chunk_groups[m.chunk.group_index].grads.wait_arrived(m)
        self._note_factor(members)
        confirmed = self._compare(groups, table)
        used = {m.chunk.group_index for m in members}
        for number in sorted(used):
            mine = [
                (g, [m for m in some if m.chunk.group_index == number and m not in confirmed])
                for g, some in groups
            ]
            self._submit_rest(self._params.chunk_groups[number], mine, table)
        for m in confirmed:
            m.step += 1
        self._counts.end_step()
        for chunk_group in self._params.chunk_groups:
            chunk_group.updates.end_step()
            if chunk_group.ranks is not None:
                chunk_group.ranks.grad_reducer.means.new.clear()
        self.finish_awaited()

    def _note_factor(self, members: Iterable[ManagedParam]) -> None:
        """What the next steps' guesses learn from this one."""
        scale = self._loss_scale.grad_factor
        factors = {m.grad_factor / scale for m in members}
        revoked = any(
            state.was_revoked
            for chunk_group in self._params.chunk_groups
            for state in chunk_group.updates.chunks
        )
        self._prediction.note(factors.pop() if len(factors) == 1 and not revoked else None)

    def _compare(self, groups: Groups, table: HyperTable) -> set[ManagedParam]:
        """Keeps the speculative updates that are what step() would make of `groups`, which it
        returns the parameters of; the others are taken back."""
        updated = {m for _, members in groups for m in members}
        confirmed: set[ManagedParam] = set()
        for chunk_group in self._params.chunk_groups:
            updates, params = chunk_group.updates, chunk_group.params
            for state in updates.speculative:
                chunk, update = state.chunk, state.update
                assert isinstance(update, Speculative)
                members = update.members
                now = [m for m in chunk_group.grads.members(chunk) if m in updated]
                if updates.take_back(chunk):
                    pass  # nothing of it was made
                elif now == list(members) and table.hypers_of(members) == update.hypers:
                    params.updates.confirm(chunk)
                    confirmed.update(members)
                else:
                    updates.revoke(chunk)
        return confirmed

    def _submit_rest(self, chunk_group: ChunkGroup, groups: Groups, table: HyperTable) -> None:
        """Submits the step's last updates, of parameters in `groups`, all in `chunk_group`."""
        update = chunk_group.update_tasks.prepare(groups, table)
        for each in update.chunks:
            chunk_group.params.updates.begin(each.chunk, each.members)
        try:
            with chunk_group.optim_states.lock:
                chunk_group.update_tasks.submit(update, last=True)
        finally:  # other ranks that ask are told of a failure, too
            under_way = chunk_group.updates.under_way
            chunk_group.params.updates.publish(under_way)

    def end_step(self) -> None:
        """step() is over, with or without an update: the next backward is of another step."""
        self._in_backward = False
        self._group_of.clear()

    # Waiting

    def finish_awaited(self) -> None:
        """Waits for the updates that do not go on after step()."""
        for chunk_group in self._params.chunk_groups:
            under_way = chunk_group.updates.under_way
            awaited = [
                chunk for chunk in under_way if chunk_group.updates.chunks[chunk.id].is_awaited
            ]
            if awaited:
                self._finish(chunk_group, awaited, all_of_them=awaited == under_way)

    def wait_all(self) -> None:
        """Until all parameters have their new values, but for speculative ones. Raises what an
        update met."""
        for chunk_group in self._params.chunk_groups:
            under_way = chunk_group.updates.under_way
            if under_way:
                self._finish(chunk_group, under_way, all_of_them=True)

    def wait_copied(self) -> None:
        """Until no save or commit that goes on has to copy anything more."""
        for chunk_group in self._params.chunk_groups:
            chunk_group.updates.versions.snapshots.wait_all()

    def _finish(self, chunk_group: ChunkGroup, chunks: list[Chunk], all_of_them: bool) -> None:
        if all_of_them:
            # (One call of native code, which Ctrl-C does not end: parameters that step() leaves
            # attached are complete then.)
            chunk_group.updates.wait_all_computed()
        chunk_group.params.updates.finish(chunks)
        chunk_group.grads.slots.release_used()


def is_free(managed: ManagedParam) -> bool:
    """Whether nothing uses the parameter or has changed it, so that it can be updated or moved."""
    writes = managed.writes
    is_changed = managed.is_moved or writes.are_unnoticed or writes.passed_master
    return managed.uses == 0 and managed.state.is_home and not is_changed


class GradCounts:
    """Counts the gradients that autograd adds up for a parameter until the optimizer's step.

    Usually one; several if the parameter is used by several backward calls, or inside and outside
    of a reentrant checkpoint. The number is not known in advance, so the steps so far are the rule:
    a gradient is final when it is the sum of as many as the most that any step brought. In the
    first step none is.
    """

    def __init__(self) -> None:
        self._most: dict[ManagedParam, int] = {}  # in any step before this one
        self._now: dict[ManagedParam, int] = {}  # gradients in the sum that is kept now

    def note(self, managed: ManagedParam, added: bool, counts: bool) -> None:
        """A gradient came: it was `added` to the one that is kept, or is the first.

        It `counts` unless more are known to come, as inside no_sync().
        """
        self._now[managed] = (self._now.get(managed, 0) if added else 0) + counts

    def are_final(self, members: Iterable[ManagedParam]) -> bool:
        """Whether all of `members` have the gradient that the step will use."""
        for m in members:
            expected = self._most.get(m, 0)  # 0: not known
            if not (0 < expected == self._now.get(m) and m.has_grad):
                return False
        return True

    def end_step(self) -> None:
        """The step was made with the gradients that are kept now."""
        for managed, count in self._now.items():
            if managed.has_grad:
                self._most[managed] = max(count, self._most.get(managed, 0))
        self._now.clear()


_STEPS = 8  # that are remembered
# Of them so many must have had the factor. An update that is taken back costs compute and bandwidth
# that backward has to spare, mostly; one that was not made early costs its whole time.
LEAST_SHARE = 0.5


class FactorPrediction:
    """Guesses the factor by which gradients are multiplied between backward and step().

    Without clipping it is 1, with a GradScaler one over its scale, which seldom changes. Clipping
    gives 1 where the norm is small enough, and else a number that does not come again.
    """

    def __init__(self, always: bool) -> None:
        """`always`: guess whatever recent steps say."""
        self._always = always
        self._recent: deque[float | None] = deque(maxlen=_STEPS)

    def guess(self) -> float | None:
        """The factor; None if a guess would be wrong too often."""
        found = Counter(
            f for f in self._recent if f is not None and (f == 1.0 or self._recent.count(f) > 1)
        )
        factor, count = found.most_common(1)[0] if found else (1.0, 0)
        if self._always or count >= max(1, LEAST_SHARE * len(self._recent)):
            return factor
        return None

    @property
    def has_steps(self) -> bool:
        """Whether note() was called."""
        return bool(self._recent)

    def note(self, factor: float | None) -> None:
        """A step was made, with this factor of all gradients; None if a guess could not help:
        factors differed, or what was updated early had to be taken back for another reason."""
        self._recent.append(factor)
