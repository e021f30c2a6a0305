"""All managed parameters: each use goes to the chunk group that has the chunk."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_iter

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunks.layout import Chunk
from hetero.ranks.process_groups import error_that_ends_this_rank
from hetero.state.gathering.agreed_gathers import AgreedGathers, agree_on_gathers, begin_gathers
from hetero.state.managed_param import ManagedParam, ParamState
from offload.errors import ClosedError, HeteroError
from offload.interrupts import Damage


class AddsParams(Protocol):
    """Gives parameters a place that they did not get at initialize()."""

    def take_in_unfrozen(self) -> None:
        """Adds frozen parameters that need gradients by now and are the optimizer's."""

    def admit(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Adds the parameters of a new param group."""


class ParamRegistry:
    """The managed parameters of an engine and the chunk groups that have them; more may come.

    Attributes:
        managed: by id() of the parameter.
        first_number: by a parameter's index, the number of its first element in the model.
    """

    def __init__(self, first_number: Mapping[int, int]) -> None:
        self.first_number = dict(first_number)
        self.chunk_groups: list[ChunkGroup] = []
        self.managed: dict[int, ManagedParam] = {}
        self.is_open = True
        self._damage = Damage()
        self._half_loaded = ""  # the checkpoint whose loading has begun and not ended
        self._is_loading = False
        # By thread: uses by modules whose forwards run, but for what has stepped aside.
        self._of_modules: dict[int, Counter[ManagedParam]] = {}

    def close(self) -> None:
        """The values are about to go: from now on every use raises ClosedError."""
        self.is_open = False

    def check_open(self) -> None:
        """Raises ClosedError after close(), HeteroError if values may be half changed."""
        if not self.is_open:
            raise ClosedError(
                "parameters have no values after engine.close(); what is still needed, as a copy "
                "of model.state_dict(), has to be taken before"
            )
        self._damage.check()
        if self._half_loaded and not self._is_loading:
            raise HeteroError(
                f"the model is half loaded from {self._half_loaded}, which is damaged, or could "
                f"not be read; load a checkpoint that is whole"
            )

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside the block a checkpoint is loaded: begin_loading() and end_loading() say when."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def begin_loading(self, checkpoint: str) -> bool:
        """Values are about to be replaced: until end_loading() nobody else can use them.

        Returns whether they were half loaded before.
        """
        was_half_loaded, self._half_loaded = bool(self._half_loaded), checkpoint
        return was_half_loaded

    def end_loading(self) -> None:
        """All values are of one checkpoint."""
        self._half_loaded = ""

    def in_order(self) -> list[ManagedParam]:
        """All managed parameters, in the model's order."""
        return sorted(self.managed.values(), key=lambda m: m.slice.param.index)

    def known(self, param: torch.Tensor) -> ManagedParam | None:
        """The ManagedParam of a tensor; None if it is not managed."""
        return self.managed.get(id(param))

    def group(self, chunk: Chunk) -> ChunkGroup:
        """The chunk group that has the chunk."""
        return self.chunk_groups[chunk.group_index]

    @property
    def gathers(self) -> bool:
        """Whether some parameters are gathered."""
        return any(chunk_group.params.gathers for chunk_group in self.chunk_groups)

    def is_resident(self, chunk: Chunk) -> bool:
        """Whether the whole chunk's home is where compute happens, which uses it in place."""
        return self.group(chunk).params.is_resident(chunk)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's parameters now, whole and flat; unless resident a pin on a gathered copy."""
        return self.group(chunk).params.flat(chunk)

    @contextmanager
    def present(
        self, members: Sequence[ManagedParam], operands: Any = None, steps_aside: bool = False
    ) -> Iterator[None]:
        """Inside the block the parameters have their values, in the compute dtype.

        All are released in the end, also if one could not be acquired. What user code has changed
        in place is kept, with one rank.

        A module has its parameters for all of its forward, and its ancestors have theirs; an
        operator inside may be given others. So that no more than what one module or operator is
        given has to fit at once, modules' parameters are absent (`steps_aside`) for the time of a
        block that finds no room beside them.

        Args:
            members: the parameters.
            operands: tensors that are used together with them, in a tree: these do not step aside.
            steps_aside: these may, in blocks inside this one.

        Raises:
            HeteroError: with several ranks, one was changed.
            BudgetError: pins leave no room.
            PeerError, NativeIoError: values could not be brought.
        """
        thread, aside = threading.get_ident(), Counter[ManagedParam]()
        groups, is_checked = self.chunk_groups, False
        with ExitStack() as acquired:
            acquired.callback(self._step_back, aside)  # when there is as much room as before
            for managed in members:
                access = groups[managed.chunk.group_index].params
                if not access.is_resident(managed.chunk):
                    if not is_checked:
                        _refuse_recordings(managed)
                        is_checked = True
                    if not access.has_room(managed.chunk):
                        aside.update(self._let_step_aside(members, operands))
                access.acquire(managed)
                if steps_aside:
                    self._of_modules.setdefault(thread, Counter())[managed] += 1
                    acquired.callback(self._release_of_module, thread, managed)
                else:
                    acquired.callback(self._release, managed)
            yield

    def _let_step_aside(
        self, members: Sequence[ManagedParam], operands: Any
    ) -> Counter[ManagedParam]:
        """Releases parameters that modules hold and nothing else uses.

        Returns how often each was released.
        """
        aside = Counter[ManagedParam]()
        uses = self._of_modules.get(threading.get_ident())
        if uses is None or len(self._of_modules) > 1:  # other threads may be using them
            return aside
        tensors = (each for each in tree_iter(operands) if isinstance(each, torch.Tensor))
        stay = {*members, *map(self.known, tensors)}
        for managed, count in list(uses.items()):
            gathered = managed.state is ParamState.GATHERED and not managed.writes.are_unnoticed
            if gathered and managed.uses == count and managed not in stay:
                aside[managed] = uses.pop(managed)
                for _ in range(count):
                    self._release(managed)
        return aside

    def _step_back(self, aside: Counter[ManagedParam]) -> None:
        """Acquires parameters again that have stepped aside, in this thread."""
        for managed in aside.elements():
            self.group(managed.chunk).params.acquire(managed)
            self._of_modules.setdefault(threading.get_ident(), Counter())[managed] += 1

    def _release_of_module(self, thread: int, managed: ManagedParam) -> None:
        """Releases a parameter that a module has held, unless it could not step back."""
        uses = self._of_modules.get(thread, Counter())
        if uses[managed]:
            uses[managed] -= 1
            self._release(managed)
        uses += Counter()  # forgets what is not held
        if not uses:
            self._of_modules.pop(thread, None)

    def _release(self, managed: ManagedParam) -> None:
        changed = self.chunk_groups[managed.chunk.group_index].params.release(managed)
        if changed is not None:
            self.keep_written(managed, changed)

    def keep_written(self, managed: ManagedParam, values: torch.Tensor) -> None:
        """Brings `values`, which user code has made of the parameter's, home.

        Raises HeteroError with several ranks, which might have made different ones of them.
        """
        chunk_group = self.group(managed.chunk)
        if chunk_group.world.everyone is not None:
            chunk_group.params.copies.discard(managed.chunk)
            raise HeteroError(
                f"{managed.name} was changed in place where only reading is possible, because "
                f"other ranks have parts of it; change it inside hetero.gathered(..., "
                f"modifier_rank=0)"
            )
        chunk_group.keep_written(managed, values)

    def take_in_written(self, members: Iterable[ManagedParam]) -> None:
        """Takes account of what user code has written to parameters, with one rank: to resident
        ones, and what masters have not followed yet."""
        for managed in members:
            chunk_group, writes = self.group(managed.chunk), managed.writes
            resident = managed.state is ParamState.RESIDENT and not managed.is_moved
            if resident and writes.are_unnoticed and chunk_group.world.everyone is None:
                chunk_group.keep_written(managed, None)
            if writes.passed_master:
                chunk_group.follow_written(managed)

    def finish_transfers(self, what: str, ends_step: bool = False) -> None:
        """Waits until nothing that was asked of other ranks is under way. All ranks call it.

        Args:
            what: names the call in errors.
            ends_step: the next uses of parameters are another step's.

        Raises:
            PeerError: another rank failed, or did not come.
            HeteroError: the ranks have gathered different chunks, so what they computed is wrong.
        """
        shard = self.chunk_groups[0].world.shard
        if shard is not None and self._agreed_gathers:
            agree_on_gathers(self._agreed_gathers, shard, ends_step, what)
        for chunk_group in self.chunk_groups:
            chunk_group.params.finish_transfers()

    def leave(self) -> None:
        """This rank makes nothing more with the others, but answers them until they leave, too."""
        world = self.chunk_groups[0].world
        if world.everyone is None:
            return
        error = error_that_ends_this_rank()
        if error is None:
            for chunk_group in self.chunk_groups:
                chunk_group.params.updates.wait_gathers_quietly()
        world.leave(error)
        # All groups stop before the first one answers, which takes as long as the others train.
        for chunk_group in self.chunk_groups:
            chunk_group.params.stop()
        for chunk_group in self.chunk_groups:
            chunk_group.answer_until_left()

    def note_forward(self, begins: bool) -> None:
        """A forward of the whole model with gradients begins, or ends."""
        for gathers in self._agreed_gathers:
            gathers.note_forward(begins)

    @property
    def _agreed_gathers(self) -> list[AgreedGathers]:
        found = (chunk_group.params.agreed_gathers for chunk_group in self.chunk_groups)
        return [gathers for gathers in found if gathers is not None]

    def forget_gathers(self) -> None:
        """Homes and slots are about to change: each rank gathers alone. All ranks call it."""
        for gathers in self._agreed_gathers:
            gathers.forget()

    def begin_gathers(self, chunk_groups: Sequence[ChunkGroup] | None = None) -> None:
        """Homes and slots have changed, of all chunk groups or of some, or these are new.

        The ranks gather their chunks together from now on. All ranks call it.
        """
        shard = self.chunk_groups[0].world.shard
        found = self.chunk_groups if chunk_groups is None else chunk_groups
        agreed = [g for group in found if (g := group.params.agreed_gathers) is not None]
        if shard is not None and agreed:
            begin_gathers(agreed, shard)


def _refuse_recordings(managed: ManagedParam) -> None:
    """Raises HeteroError where what is brought would be wrapped, or taken into a recording."""
    if torch._C._is_tracing():
        raise HeteroError(
            f"{managed.name} cannot be brought in inside torch.jit.trace(), which would keep its "
            f"values; trace a plain copy of the model: copy.deepcopy(model)"
        )
    modes, mode_of = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    if mode_of(modes.FAKE) is not None or mode_of(modes.PROXY) is not None:
        raise HeteroError(
            f"{managed.name} cannot be brought in where tensors have no values, as in "
            f"torch.export.export(); export a plain copy of the model: copy.deepcopy(model)"
        )
    transforms = torch._C._functorch
    top = transforms.peek_interpreter_stack()
    if top is not None and top.key() in (
        transforms.TransformType.Grad,
        transforms.TransformType.Jvp,
    ):
        raise HeteroError(
            f"{managed.name} cannot be brought in inside torch.func.grad(), vjp(), jvp() and what "
            f"they are made of; use a plain copy of the model there: copy.deepcopy(model)"
        )
