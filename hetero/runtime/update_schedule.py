"""When each chunk is updated, and who waits for it: one mechanism, two policies.

A chunk's update is submitted by step(), or during backward as soon as its gradients are final; and
step() waits for it, or the next use of the chunk does. The option overlap_updates chooses. Each
chunk group's ChunkUpdates has the states, and makes those wait who need a chunk's memory.

What is submitted during backward is *speculative*: it is made with a guess of what step() will say,
which is the options of the param groups as they are now, and the factor that clipping and unscaling
gave gradients in recent steps. Such an update leaves what it reads. step() compares: it keeps the
update, or has it made again. Before anybody uses a value in between, or changes a gradient, the
chunk's update is taken back. So training has the same bits as without, and nobody sees a difference
but in time.

State in RAM has no second place, so its updates wait for step(), which on a GPU leaves memory idle
during backward. With step_in_backward=True, by which users say that step() follows and finds the
gradients as they came, backward makes updates of all state for good. If something else follows,
that is an error: whoever changes such a gradient, clears it, or has step() find other options.
"""

from __future__ import annotations

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
from hetero.profiler_marks import marked
from hetero.runtime.factor_prediction import FactorPrediction
from hetero.runtime.grad_counts import GradCounts
from hetero.runtime.modules.call_stack import inside_another_backward
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.state.chunk_state import ChunkState, Speculative
from hetero.state.loss_scale import LossScale
from hetero.state.managed_param import ManagedParam
from offload.errors import HeteroError


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
        self.overlap = config.debugging.overlap
        self._loss_scale = loss_scale
        self._counts = GradCounts()
        self._optimizers = optimizers
        self._prediction = FactorPrediction(always=self.overlap is not OverlapUpdates.AUTO)
        self._guess: float | None = None  # of this step's factor
        self._reads_ahead = config.debugging.prefetch
        self._is_for_good = config.step_in_backward  # what backward updates stays
        self._in_backward = False  # a gradient has come in this step
        self._group_of: dict[int, int] = {}  # by id(param): index of its param group

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
        self._guess = None
        if speculates:
            self._guess = 1.0 if self._is_for_good else self._prediction.guess()
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

    def revoke(self, managed: ManagedParam) -> None:
        """A gradient of the parameter comes, or is assigned: its chunk's is not the final one."""
        updates = self._params.group(managed.chunk).updates
        updates.chunks[managed.chunk.id].check_grad_is_open()
        updates.revoke(managed.chunk)

    def grad_arrived(self, managed: ManagedParam, added: bool, counts: bool) -> None:
        """A gradient is kept (GradCounts.note()). Submits the updates that can be made now."""
        if not self.overlap.in_backward:
            return
        self._counts.note(managed, added, counts)
        if not counts or self._guess is None:
            return
        chunk_group, arrived = self._params.group(managed.chunk), [managed.chunk]
        if chunk_group.ranks is not None:
            grad_reducer = chunk_group.ranks.grad_reducer
            grad_reducer.finish_means()
            arrived, grad_reducer.new_means = grad_reducer.new_means, []
        chunk_group.params.updates.finish(arrived)  # of the last step
        for chunk in arrived:
            self._note_final(chunk)
        final = [chunk for group in self._params.chunk_groups for chunk in group.updates.final]
        if final and not inside_another_backward():
            for chunk in final:
                # (Gradients may have been cleared since, or another one have come.)
                if self._note_final(chunk):
                    chunk_group = self._params.group(chunk)
                    if not chunk_group.grads.has_arrived(chunk):
                        return  # it is on its way from the device
                    if not chunk_group.updates.versions.snapshots.may_change(chunk):
                        return  # a save, or the last step's commit, goes on
                    self._update_early(chunk, self._guess)

    def _note_final(self, chunk: Chunk) -> bool:
        chunk_group = self._params.group(chunk)
        final = self._counts.are_final(chunk_group.grads.members(chunk))
        if chunk_group.ranks is not None:
            final = final and chunk_group.ranks.grad_reducer.has_mean(chunk)
        chunk_group.updates.set_final(chunk, final)
        return final

    @marked("hetero::update")
    def _update_early(self, chunk: Chunk, factor: float) -> None:
        """Submits an update of the chunk, by default a speculative one; leaves it to step() if that
        is impossible."""
        chunk_group = self._params.group(chunk)
        updates = chunk_group.updates
        updates.set_final(chunk, False)
        members = chunk_group.grads.members(chunk)
        groups = self._grouped(members)
        if groups is None or chunk_group.grads.has_lost(chunk) or not all(map(is_free, members)):
            return
        tasks = chunk_group.update_tasks
        if not tasks.can_speculate:
            return
        if not self._is_for_good and not updates.versions.can_speculate(chunk):
            return
        try:
            table = self._optimizers[0].hyper_table(groups, factor)
        except ValueError:
            return
        speculative = Speculative(members, [table.hyper(m) for m in members])
        if self._is_for_good:
            if chunk_group.params.updates.begin_early(chunk, speculative):
                update = tasks.prepare(groups, table, in_backward=True)
                with chunk_group.optim_states.lock:
                    tasks.submit(update, last=False)
            return
        if not chunk_group.params.updates.begin_speculation(chunk, members):
            return
        update = tasks.prepare(groups, table, in_backward=True, speculative=True)
        with (
            chunk_group.optim_states.lock,
            updates.speculating(chunk, speculative) as nobody_reads,
        ):
            if nobody_reads:
                tasks.submit(update, last=False)

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
        """Takes all speculative updates back.

        Raises what an update met, and HeteroError, once, if backward has made some for good.
        """
        made = self._made_early()
        for state in made:
            state.made_early = None
        if made:
            raise HeteroError(
                f"backward has updated {len(made)} chunks, the first that of "
                f"{made[0].chunk.name} (step_in_backward=True), and optimizer.step() did not "
                f"follow: the model is between two steps. Call step() after each backward, or load "
                f"a checkpoint; or leave step_in_backward out"
            )
        for chunk_group in self._params.chunk_groups:
            chunk_group.updates.revoke_all()

    def _made_early(self) -> list[ChunkState]:
        """The chunks whose update this step's backward has made for good."""
        if not self._is_for_good:
            return []
        groups = self._params.chunk_groups
        return [s for group in groups for s in group.updates.chunks if s.made_early is not None]

    # At step()

    @marked("hetero::update")
    def step(self, groups: Groups, optimizer: OptimizerView) -> None:
        """Updates the parameters in `groups`, which are those of `optimizer` that have gradients.

        Raises ValueError for hyper-parameters that make no sense, HeteroError for a gradient that
        was lost, with nothing changed.
        """
        table = optimizer.hyper_table(groups)
        members = [m for _, some in groups for m in some]
        for chunk in dict.fromkeys(m.chunk for m in members):
            self._params.group(chunk).updates.versions.leave_committed(chunk)
        for m in members:
            self._params.group(m.chunk).grads.wait_arrived(m)
        self._note_factor(members)
        confirmed = self._compare(groups, table) | self._check_made_early(groups, table)
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
                chunk_group.ranks.grad_reducer.new_means.clear()
        self.finish_awaited()

    def _note_factor(self, members: Iterable[ManagedParam]) -> None:
        """What the next steps' guesses learn from this one."""
        factors = {m.grad_factor / self._loss_scale.grad_factor for m in members}
        revoked = any(
            state.was_revoked
            for chunk_group in self._params.chunk_groups
            for state in chunk_group.updates.chunks
        )
        self._prediction.note(factors.pop() if len(factors) == 1 and not revoked else None)

    def _compare(self, groups: Groups, table: HyperTable) -> set[ManagedParam]:
        """Keeps the speculative updates that are what step() would make of `groups`, which it
        returns the parameters of; the others are taken back, or are about to be made again."""
        updated = {m for _, members in groups for m in members}
        confirmed: set[ManagedParam] = set()
        for chunk_group in self._params.chunk_groups:
            updates, params = chunk_group.updates, chunk_group.params
            for state in updates.speculative:
                chunk, update = state.chunk, state.update
                assert isinstance(update, Speculative)
                members = update.members
                now = [m for m in chunk_group.grads.members(chunk) if m in updated]
                if now != list(members):
                    updates.revoke(chunk)
                elif updates.take_back(chunk):
                    pass  # nothing of it was made
                else:
                    is_right = [table.hyper(m) for m in members] == update.hypers
                    if is_right or state.versions.holder is None:
                        params.updates.decide(chunk, is_right)
                    else:
                        # Made again by the pipeline alone, it would overwrite the old state.
                        updates.revoke(chunk)
                    if is_right:
                        confirmed.update(members)
        return confirmed

    def _check_made_early(self, groups: Groups, table: HyperTable) -> set[ManagedParam]:
        """The parameters that backward has updated for good.

        Raises HeteroError if step() would update them otherwise.
        """
        updated = {m for _, members in groups for m in members}
        made: set[ManagedParam] = set()
        for state in self._made_early():
            assert state.made_early is not None
            for m, hyper in zip(state.made_early.members, state.made_early.hypers, strict=True):
                if m not in updated or table.hyper(m) != hyper:
                    raise HeteroError(
                        f"backward has updated {m.name} (step_in_backward=True), and step() finds "
                        f"other options of its param group, another factor of its gradient, or no "
                        f"gradient: change options after step(), as schedulers do, or leave "
                        f"step_in_backward out. The model is between two steps: load a checkpoint"
                    )
                made.add(m)
        return made

    def _submit_rest(self, chunk_group: ChunkGroup, groups: Groups, table: HyperTable) -> None:
        """Submits the step's last updates, of parameters in `groups`, all in `chunk_group`."""
        update = chunk_group.update_tasks.prepare(groups, table)
        for members in update.members:
            if not chunk_group.updates.chunks[members[0].chunk.id].is_under_way:
                chunk_group.params.updates.begin(members[0].chunk, members)
        try:
            with chunk_group.optim_states.lock:
                chunk_group.update_tasks.submit(update, last=True)
        finally:  # other ranks that ask are told of a failure, too
            for chunk in chunk_group.updates.under_way:
                chunk_group.params.updates.versions.publish(chunk)
            chunk_group.params.updates.begin_gathers(chunk_group.updates.under_way)

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

    def wait_all(self, but_early: bool = False) -> None:
        """Until all parameters have their new values, but for speculative ones, and, if asked for,
        those that this step's backward updates. Raises what an update met."""
        for chunk_group in self._params.chunk_groups:
            states, under_way = chunk_group.updates.chunks, chunk_group.updates.under_way
            waited = [c for c in under_way if not but_early or states[c.id].made_early is None]
            if waited:
                self._finish(chunk_group, waited, all_of_them=waited == under_way)

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
        chunk_group.grads.release_used()


def is_free(managed: ManagedParam) -> bool:
    """Whether nothing uses the parameter or has changed it, so that it can be updated or moved."""
    return managed.uses == 0 and managed.is_at_home and not managed.changed_unnoticed
