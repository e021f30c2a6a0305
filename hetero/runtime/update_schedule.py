"""When each chunk is updated, and who waits for it: one mechanism, two policies.

A chunk's update is submitted by step(), or during backward as soon as its gradients are final; and
step() waits for it, or the next use of the chunk does. The option overlap_updates chooses. Each
chunk group's ChunkUpdates has the states, and makes those wait who need a chunk's memory.

From the first update that is submitted during backward to step() the step is *half made*: the
chunks that were updated are locked, and the updates cannot be undone. step() updates the rest.

Backward does not need the values of a chunk whose gradients are final: autograd calls
AccumulateGrad when all nodes that give the parameter a gradient have run, and these are the ones
that read its value. Nodes that read it without giving it a gradient (detach(), torch.no_grad() in a
checkpoint's recomputation) are found out: by the version of what autograd saved, which the update
has changed, or because a locked parameter refuses to be used.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunk_groups.update_tasks import Groups, HyperOf, HyperTable, LrScaleOf, Update
from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk
from hetero.config import Config
from hetero.overlap import OverlapUpdates
from hetero.runtime.grad_counts import GradCounts
from hetero.runtime.modules.all_params import AllParams
from hetero.runtime.modules.call_stack import inside_another_backward
from hetero.state.chunk_updates import TO_GO_ON
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

    def hyper_table(self, groups: Groups) -> HyperTable:
        """All hyper-parameters that an update of `groups` takes. Raises ValueError."""
        return HyperTable(groups, self.hyper_of, self.lr_scale_of)


def check_overlap(overlap: OverlapUpdates, ranks: int, optimizers: int = 1) -> None:
    """Raises ValueError where so many ranks, or optimizers, cannot overlap updates so."""
    if overlap.in_backward and optimizers > 1:
        raise ValueError(
            f"overlap_updates={overlap.value!r} is for one optimizer, and there are {optimizers}: "
            f"a backward does not tell which of them is going to make its step; use 'forward'"
        )
    if overlap.in_backward and ranks > 1:
        raise ValueError(
            f"overlap_updates={overlap.value!r} is for one rank, and there are {ranks}: a gradient "
            f"is final when it is averaged over the ranks, which ends after backward; use 'forward'"
        )


class UpdateSchedule:
    """Submits the updates of all chunk groups and waits for them."""

    def __init__(
        self, params: AllParams, config: Config, optimizers: Sequence[OptimizerView]
    ) -> None:
        self._params = params
        self.overlap = config.overlap
        self._name = f"overlap_updates={self.overlap.value!r}"
        self._counts = GradCounts()
        self._optimizers = optimizers
        self._reads_ahead = config.prefetch
        self._has_read_ahead = False  # in this step
        # By index of the param group, the options with which it was updated during backward.
        self._options: dict[int, dict[str, Any]] = {}
        self._group_of: dict[int, int] = {}  # by id(param): index of its param group

    @property
    def _locked_chunks(self) -> list[list[ManagedParam]]:
        """The parameters of each locked chunk."""
        groups = self._params.chunk_groups
        return [members for group in groups for members in group.updates.locked.values()]

    @property
    def _locked(self) -> list[ManagedParam]:
        return [m for members in self._locked_chunks for m in members]

    @property
    def is_half_made(self) -> bool:
        """Whether some chunks are updated and the others wait for step()."""
        return bool(self._locked_chunks)

    # What is refused while a step is half made

    def refuse_half_made(self, what: str) -> None:
        """Raises HeteroError because `what` cannot be done while a step is half made."""
        if count := len(self._locked_chunks):
            raise HeteroError(
                f"{what} came while a step is half made: {count} chunks were updated during "
                f"backward ({self._name}), the others were not; {TO_GO_ON}"
            )

    def check_gradient(self, managed: ManagedParam) -> None:
        """Raises HeteroError if a gradient of a locked parameter comes, or is assigned."""
        if managed.chunk.id in self._params.group(managed.chunk).updates.locked:
            count = self._counts.expected(managed)
            raise HeteroError(
                f"{managed.name} gets another gradient after it was updated during backward "
                f"({self._name}), because no step before brought it more than {count}; put all "
                f"backward calls of a step but the last into `with hetero.no_sync(model):`, call "
                f"optimizer.step() before the next step's, or leave out overlap_updates"
            )

    # During backward

    def begin_backward(self) -> None:
        """A gradient comes: what step() needs first is read while backward runs.

        Once a step. Not before backward: reading would compete with forward, for a step that may
        not come. Not in a later backward of the step: what was read once stays.
        """
        if self._has_read_ahead or not self._reads_ahead:
            return
        self._has_read_ahead = True
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
        if not counts:
            return
        self._params.group(managed.chunk).params.finish_updates([managed.chunk])  # of the last step
        self._note_final(managed.chunk)
        final = [chunk for group in self._params.chunk_groups for chunk in group.updates.final]
        if final and not inside_another_backward():
            for chunk in final:
                # (Gradients may have been cleared since, or another one have come.)
                if self._note_final(chunk):
                    if not self._params.group(chunk).grads.has_arrived(chunk):
                        return  # it is on its way from the device
                    self._submit_early(chunk)

    def _note_final(self, chunk: Chunk) -> bool:
        chunk_group = self._params.group(chunk)
        final = self._counts.are_final(chunk_group.grads.members(chunk))
        chunk_group.updates.set_final(chunk, final)
        return final

    def _submit_early(self, chunk: Chunk) -> None:
        """Submits the chunk's update; leaves it to step() if that would refuse it."""
        chunk_group = self._params.group(chunk)
        chunk_group.updates.set_final(chunk, False)
        members = chunk_group.grads.members(chunk)
        groups = self._grouped(members)
        if groups is None or chunk_group.grads.has_lost(chunk):
            return
        if not all(is_free(m) and m.grad_factor == 1.0 for m in members):
            return
        try:
            table = self._optimizers[0].hyper_table(groups)
        except ValueError:
            return
        now = {index: _copied(options) for index, (options, some) in enumerate(groups) if some}
        if any(self._options.get(index, options) != options for index, options in now.items()):
            return
        self._options |= now
        self._submit(chunk_group, groups, table, last=False)

    def _grouped(self, members: Iterable[ManagedParam]) -> Groups | None:
        """The param groups, with `members` alone; None if one is in no group."""
        (optimizer,) = self._optimizers  # check_overlap()
        groups: Groups = [(group, []) for group in optimizer.param_groups()]
        if not self._group_of or not self.is_half_made:
            self._group_of = {
                id(p): index for index, (group, _) in enumerate(groups) for p in group["params"]
            }
        for m in members:
            index = self._group_of.get(id(m.param))
            if index is None:
                return None
            groups[index][1].append(m)
        return groups

    # Submitting

    def _submit(
        self, chunk_group: ChunkGroup, groups: Groups, table: HyperTable, last: bool
    ) -> None:
        """Submits updates of parameters in `groups`, all in `chunk_group`.

        They are the `last` of the step; else step() is still to come, and their chunks are locked.
        Raises HeteroError for a gradient that was lost, with nothing changed.
        """
        try:
            update = chunk_group.update_tasks.prepare(groups, table)
        except Exception:
            chunk_group.grads.release_used()
            raise
        for members in update.members:
            chunk_group.params.begin_update(members[0].chunk, members, lock=not last)
        try:
            with chunk_group.optim_states.lock:
                chunk_group.update_tasks.submit(update, last)
        except Exception:
            self._publish(chunk_group, update)  # other ranks that ask are told of the failure
            raise
        self._publish(chunk_group, update)

    def _publish(self, chunk_group: ChunkGroup, update: Update) -> None:
        for members in update.members:
            chunk_group.params.publish(members[0].chunk)

    def step(self, groups: Groups, optimizer: OptimizerView) -> None:
        """Updates the parameters in `groups`, but for those that backward has updated already.

        `groups` are those of `optimizer` that have gradients.

        Raises HeteroError for what would make the two parts of the step differ, and ValueError for
        hyper-parameters that make no sense, with nothing changed.
        """
        self._check_half(groups)
        locked = set(self._locked)
        rest = [(options, [m for m in some if m not in locked]) for options, some in groups]
        table = optimizer.hyper_table(rest)
        used = {m.chunk.group_index for m in locked}
        used |= {m.chunk.group_index for _, members in rest for m in members}
        for number in sorted(used):
            mine = [(g, [m for m in some if m.chunk.group_index == number]) for g, some in rest]
            self._submit(self._params.chunk_groups[number], mine, table, last=True)
        self._counts.end_step()
        self._unlock()
        if not self.overlap.in_forward:
            self.wait_all()

    def _check_half(self, groups: Groups) -> None:
        """Raises HeteroError if step() cannot complete what backward has begun."""
        for m in self._locked:
            if not m.has_grad:
                raise HeteroError(
                    f"the gradient of {m.name} was cleared after it was updated with it, during "
                    f"backward ({self._name}): the step is half made, and updates cannot be "
                    f"undone; load a checkpoint with optimizer.load_state_dict()"
                )
        for index, before in self._options.items():
            now = _copied(groups[index][0])
            changed = [key for key in before if now.get(key) != before[key]]
            if changed:
                count = len(self._locked_chunks)
                raise HeteroError(
                    f"{changed[0]} of param group {index} is {now.get(changed[0])!r} at step() and "
                    f"was {before[changed[0]]!r} during backward, when {count} chunks were updated "
                    f"with it ({self._name}); change it, or step the scheduler, after step() and "
                    f"before the next backward"
                )

    def end_step(self) -> None:
        """step() is over, with or without an update: the next backward is of another step."""
        self._has_read_ahead = False

    def abandon(self, replaced: Container[ManagedParam]) -> None:
        """The parameters `replaced` are about to get other masters and states, so the step is no
        more half made.

        Raises HeteroError if others were updated.
        """
        for m in self._locked:
            if m not in replaced:
                raise HeteroError(
                    f"the state that is loaded lacks the master of {m.name}, which was updated "
                    f"already in a step that is half made ({self._name}); load one of all "
                    f"parameters"
                )
        for chunk_group in self._params.chunk_groups:
            if chunk_group.updates.locked:
                chunk_group.update_tasks.stop()
        self._unlock()
        self.wait_all()

    def _unlock(self) -> None:
        """The step is made, or will not be."""
        self._options.clear()
        self._group_of.clear()
        for chunk_group in self._params.chunk_groups:
            chunk_group.updates.end_step()

    # Waiting

    def wait_all(self) -> None:
        """Until all parameters have their new values, but for locked ones. Raises what an update
        met."""
        for chunk_group in self._params.chunk_groups:
            under_way = chunk_group.updates.under_way
            if under_way:
                # (One call of native code, which Ctrl-C does not end: parameters that step() leaves
                # attached are complete then.)
                chunk_group.updates.pipeline.wait_updated()
                chunk_group.params.finish_updates(under_way)
                chunk_group.grads.release_used()

    def _group(self, chunk: Chunk) -> ChunkGroup:
        return self._params.chunk_groups[chunk.group_index]


def is_free(managed: ManagedParam) -> bool:
    """Whether nothing uses the parameter or has changed it, so that it can be updated or moved."""
    return managed.uses == 0 and managed.is_at_home and not managed.changed_unnoticed


def _copied(options: dict[str, Any]) -> dict[str, Any]:
    """A param group's options as they are now."""
    return {
        key: float(value) if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
        if key != "params"
    }
