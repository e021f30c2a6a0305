"""Updates that begin while backward still runs (`early_updates=True`).

A chunk is updated as soon as all its trained parameters have their final gradients (arrivals.py
says when that is) and backward needs its values no more. From the first of these updates to
step() the step is *half made*: what was updated has no values to be read, cannot get another
gradient, and cannot be undone. step() updates the rest.

Why backward needs them no more: autograd calls AccumulateGrad when all nodes that give the
parameter a gradient have run, and these are the ones that read its value. What reads it without
giving it a gradient (detach(), torch.no_grad() in a checkpoint's recomputation) is found out: by
the version of what autograd saved, which the update has changed, or because an updated parameter
reads NaN and refuses to be used by a module.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunk_groups.update_tasks import Groups, hyper_table
from hetero.chunks.layout import Chunk
from hetero.config import Config
from hetero.runtime.call_stack import inside_another_backward
from hetero.runtime.grad_counts import Arrivals
from hetero.runtime.optimizer_view import OptimizerView
from hetero.runtime.updates_in_flight import Key, Unfinished, key_of
from hetero.state.managed_param import ManagedParam
from offload.errors import HeteroError, StaleGraphError

_TO_GO_ON = (
    "call optimizer.step() first; to give the step up instead, load a checkpoint with "
    "optimizer.load_state_dict(), because updates cannot be undone"
)


def check_early_updates(config: Config, ranks: int) -> None:
    """Raises ValueError where updates cannot begin early."""
    if config.early_updates and ranks > 1:
        raise ValueError(
            f"early_updates is for one rank, and there are {ranks}: gradients of several are "
            f"averaged first; leave it out"
        )


class EarlyUpdates:
    """Follows the gradients of each step, and begins the updates that can be."""

    def __init__(
        self,
        chunk_groups: Sequence[ChunkGroup],
        unfinished: Unfinished,
        enabled: bool,
        accumulating: Callable[[], bool],
        optimizer: OptimizerView,
    ) -> None:
        """`chunk groups` may grow. `accumulating`: whether more gradients of the step are known to
        come.

        Unless `enabled` all is left to step().
        """
        self._chunk_groups = chunk_groups
        self._unfinished = unfinished
        self._enabled = enabled
        self._accumulating = accumulating
        self._param_groups = optimizer.param_groups
        self._hyper_of = optimizer.hyper_of
        self._arrivals = Arrivals()
        # Chunks with final gradients that are on their way to RAM, or whose values a caller of
        # this backward may still have. By chunk group and chunk, as those that were updated.
        self._ready: dict[Key, Chunk] = {}
        self._updated: dict[Key, list[ManagedParam]] = {}
        # Whose update is about to begin: set for good if that was interrupted, as by Ctrl-C, and
        # nobody knows whether it has begun.
        self._beginning = ""
        # By group, the options with which its parameters were updated in this step.
        self._options: dict[int, dict[str, Any]] = {}
        self._group_of: dict[int, int] = {}  # by id(param), in this step
        # By address: homes that compute uses, and that may change while backward runs.
        self.changing_homes: dict[int, Chunk] = {}

    def connect(self, chunk_group: ChunkGroup) -> None:
        """From now on gradients of the chunk group come, too."""
        if not self._enabled:
            return
        chunk_group.stepper.follow(backward=True)
        self.follow_homes(chunk_group)

    def follow_homes(self, chunk_group: ChunkGroup) -> None:
        """Homes of the chunk group are where they are now: some may have moved."""
        if not self._enabled:
            return
        changing = self.changing_homes
        mine = chunk_group.layout.chunks[0].group_index
        for address in [at for at, chunk in changing.items() if chunk.group_index == mine]:
            del changing[address]
        for chunk in chunk_group.layout.chunks:
            if chunk.trainable and chunk_group.params.is_resident(chunk):
                home = chunk_group.params.home(chunk).untyped_storage()
                changing[home.data_ptr()] = chunk

    @property
    def half_made(self) -> bool:
        """Whether some chunks are updated and the others wait for step()."""
        return bool(self._updated)

    @property
    def chunk_groups(self) -> set[int]:
        """The chunk groups of what was updated in this step."""
        return {chunk_group for chunk_group, _ in self._updated}

    def has(self, managed: ManagedParam) -> bool:
        """Whether it was updated in this step."""
        return key_of(managed.chunk) in self._updated

    def is_unmoved(self, managed: ManagedParam) -> bool:
        """Whether it was updated in this step, and user code has not pointed it elsewhere."""
        return self.has(managed) and not managed.is_moved

    # What is refused while a step is half made

    def require_whole(self, what: str) -> None:
        """Raises HeteroError for `what` cannot be done while a step is half made."""
        if self.half_made:
            raise HeteroError(
                f"{what} came while a step is half made: {len(self._updated)} chunks were updated "
                f"during backward (early_updates=True), the others were not; {_TO_GO_ON}"
            )

    def check_use(self, managed: ManagedParam) -> None:
        """Raises HeteroError if the value of an updated parameter is needed before step()."""
        if not self.has(managed):
            return
        if torch._C._current_graph_task_id() == -1:
            raise HeteroError(
                f"{managed.name} is used after it was updated during backward "
                f"(early_updates=True), and before step(), which updates the others; {_TO_GO_ON}"
            )
        raise HeteroError(_needed_later(managed.name))

    def check_saved(self, chunk: Chunk) -> None:
        """Raises StaleGraphError if backward needs what it saved of an updated chunk."""
        if key_of(chunk) in self._updated:
            raise StaleGraphError(_needed_later(chunk.name))

    def check_gradient(self, managed: ManagedParam) -> None:
        """Raises HeteroError if a gradient of an updated parameter comes, or is assigned."""
        if self.has(managed):
            count = self._arrivals.expected(managed)
            raise HeteroError(
                f"{managed.name} gets another gradient after it was updated during backward "
                f"(early_updates=True), because no step before brought it more than {count}; put "
                f"all backward calls of a step but the last into `with hetero.no_sync(model):`, "
                f"call optimizer.step() before the next step's, or leave out early_updates"
            )

    # While backward runs

    def arrived(self, managed: ManagedParam, added: bool) -> None:
        """A gradient was kept, `added` to what was there. Begins the updates that can be."""
        if not self._enabled:
            return
        counts = not self._accumulating()
        self._arrivals.note(managed, added, counts)
        if not counts:
            return
        chunk = managed.chunk
        if self._arrivals.are_final(self._members(chunk)):
            self._ready[key_of(chunk)] = chunk
        if self._ready and not inside_another_backward():
            self._begin_ready()

    def _begin_ready(self) -> None:
        for key, chunk in list(self._ready.items()):
            members = self._members(chunk)
            # (Gradients may have been cleared since, or another have come.)
            if self._arrivals.are_final(members):
                if not self._chunk_group(chunk).grads.has_arrived(chunk):
                    return
                self._begin(chunk, members)
            del self._ready[key]

    def _begin(self, chunk: Chunk, members: list[ManagedParam]) -> None:
        """Begins the chunk's update; leaves it to step() if that would refuse it."""
        chunk_group = self._chunk_group(chunk)
        groups = self._grouped(members)
        if chunk_group.grads.has_lost(chunk):
            return
        if groups is None or not all(map(self._is_updatable, members)):
            return
        try:
            table = hyper_table(groups, self._hyper_of)
        except ValueError:
            return
        now = {index: _copied(options) for index, (options, some) in enumerate(groups) if some}
        if any(self._options.get(index, options) != options for index, options in now.items()):
            return
        self._options |= now
        self._beginning = f"the update of {chunk.name}"
        self._updated[key_of(chunk)] = members
        self._unfinished.begin(chunk_group, groups, table, last=False)
        self._beginning = ""

    @staticmethod
    def _is_updatable(m: ManagedParam) -> bool:
        free = m.uses == 0 and m.is_at_home and not m.changed_unnoticed
        return free and m.grad_factor == 1.0

    def _grouped(self, members: Iterable[ManagedParam]) -> Groups | None:
        """The param groups, with `members` alone; None if one is in no group."""
        groups: list[tuple[dict[str, Any], list[ManagedParam]]]
        groups = [(group, []) for group in self._param_groups()]
        if not self._group_of or not self._updated:
            self._group_of = {
                id(p): index for index, (group, _) in enumerate(groups) for p in group["params"]
            }
        for m in members:
            index = self._group_of.get(id(m.param))
            if index is None:
                return None
            groups[index][1].append(m)
        return groups

    # The step

    def rest(self, groups: Groups) -> Groups:
        """`groups` without what was updated. Raises HeteroError, with nothing changed."""
        if self._beginning:
            raise HeteroError(
                f"{self._beginning} was interrupted in a step that is half made "
                f"(early_updates=True), and nobody knows whether it was made; load a checkpoint "
                f"with optimizer.load_state_dict()"
            )
        for members in self._updated.values():
            for m in members:
                if not m.has_grad:
                    raise HeteroError(
                        f"the gradient of {m.name} was cleared after it was updated with it, "
                        f"during backward (early_updates=True): the step is half made, and updates "
                        f"cannot be undone; load a checkpoint with optimizer.load_state_dict()"
                    )
        for index, before in self._options.items():
            now = _copied(groups[index][0])
            changed = [key for key in before if now.get(key) != before[key]]
            if changed:
                raise HeteroError(
                    f"{changed[0]} of param group {index} is {now.get(changed[0])!r} at step() and "
                    f"was {before[changed[0]]!r} during backward, when {len(self._updated)} chunks "
                    f"were updated with it (early_updates=True); change it, or step the "
                    f"scheduler, after step() and before the next backward"
                )
        return [(options, [m for m in some if not self.has(m)]) for options, some in groups]

    def interrupted(self) -> None:
        """Ctrl-C came while step() updated the rest."""
        if self.half_made:
            self._beginning = "optimizer.step()"

    def finish(self) -> None:
        """All updates of the step have begun."""
        self._end()
        self._arrivals.end_step()

    def give_up(self, replaced: Container[ManagedParam]) -> None:
        """The parameters `replaced` get other values and states: the step is no more half made.

        Raises HeteroError if others were updated.
        """
        for members in self._updated.values():
            for m in members:
                if m not in replaced:
                    raise HeteroError(
                        f"the state that is loaded lacks {m.name}, which was updated already in a "
                        f"step that is half made (early_updates=True); load one of all parameters"
                    )
        for number in self.chunk_groups:
            self._chunk_groups[number].stepper.stop()
        self._end()
        self._unfinished.release_held()
        self._unfinished.finish_all()

    def _end(self) -> None:
        self._beginning = ""
        self._ready.clear()
        self._updated.clear()
        self._options.clear()
        self._group_of.clear()

    def _chunk_group(self, chunk: Chunk) -> ChunkGroup:
        return self._chunk_groups[chunk.group_index]

    def _members(self, chunk: Chunk) -> list[ManagedParam]:
        return self._chunk_group(chunk).grads.members(chunk)


def _copied(options: dict[str, Any]) -> dict[str, Any]:
    """A param group's options as they are now."""
    return {
        key: float(value) if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
        if key != "params"
    }


def _needed_later(name: str) -> str:
    return (
        f"backward needs the value of {name} after it was updated (early_updates=True), because it "
        f"had as many gradients as in the steps before. If this is a further backward of the same "
        f"step, put all but the last into `with hetero.no_sync(model):`; if a part of the model "
        f"uses it without giving it a gradient (detach(), torch.no_grad()), or gives it one only "
        f"sometimes, leave out early_updates"
    )
