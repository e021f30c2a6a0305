"""One managed parameter: what `param.data` is, and who holds the memory behind it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero.chunks.layout import Chunk, Layout, ParamSlice
from hetero.stand_ins.grad_placeholder import GradOps, GradPlaceholder
from hetero.stand_ins.parameter_classes import become, set_absent
from offload.errors import HeteroError

_CPU = torch.device("cpu")
# Held for a moment, by whoever gives a parameter other memory or another class. (Reentrant: memory
# that is freed may end objects that do so, too.)
_CHANGING = threading.RLock()
Range = slice  # in ManagedParam that is the name of a field


class ParamState(enum.Enum):
    """What a managed parameter's `param.data` is, and who holds the memory behind it.

    The stand-in has the parameter's shape and dtype over a single NaN element, so it takes no
    memory. While `param.data` is the stand-in the parameter's class is AbsentParameter, whose torch
    functions bring the values in; else it is PresentParameter.

        UNPLACED -> RESIDENT | OFFLOADED             place()
        OFFLOADED <-> GATHERED                       begin_use(), end_use()
        RESIDENT | OFFLOADED <-> UPDATING            begin_update(), end_update(), revoke_update()
        RESIDENT -> MOVING -> RESIDENT | OFFLOADED   begin_move(), end_move()
        RESIDENT | GATHERED | OFFLOADED <-> COPIED   as_copy()
        any -> RETIRED                               retire(), close()
    """

    UNPLACED = "the construction arena's, or the user's, tensor, or the stand-in after unload()"
    RESIDENT = "a view of the chunk's home, which is where compute happens: the only memory of it"
    OFFLOADED = "the stand-in; the values are at home on another tier, or in all ranks' shards"
    GATHERED = "a view of a gathered copy of the chunk, pinned until no parameter of it is used"
    UPDATING = "the stand-in; the chunk's update has begun, and its home has no values until then"
    COPIED = "a copy outside the budgets, which user code may change in place"
    MOVING = "the stand-in; the home, which was where compute happens, is going to another tier"
    RETIRED = "not this object's: another chunk group has the parameter, or the engine is closed"

    @property
    def is_home(self) -> bool:
        """Whether the values are where the chunk's home is, and nowhere else."""
        return self in (ParamState.RESIDENT, ParamState.OFFLOADED)


def can_train(param: torch.Tensor) -> bool:
    """Whether a parameter can have a gradient: torch's optimizers pass over those that cannot."""
    return param.is_floating_point() or param.is_complex()


def refuse_managed(param: torch.Tensor, name: str) -> None:
    """Raises HeteroError for a parameter that an engine manages: its values may be elsewhere."""
    if getattr(param, "_hetero_engine", None) is not None:
        raise HeteroError(
            f"{name} belongs to another engine; build another module and load its state_dict()"
        )


class ParamWrites:
    """Counts the changes of a parameter by torch's version counter, which autograd compares."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        """No change is known."""
        self._param = param
        self._known = 0  # the counter when the parameter was last changed by the engine
        self._own = 0  # changes that are no writes: updates and moves
        self.passed_master = False  # a write is at home, but the master is not compared with it
        self._before: Any = None  # brings back the counter from before a revocable change

    @property
    def count(self) -> int:
        """How often the parameter was written to in place, but for updates and moves."""
        with torch._C.DisableTorchFunction():  # which a parameter's class is asked by
            return self._param._version - self._own

    @property
    def are_unnoticed(self) -> bool:
        """Whether user code has written to the parameter in place outside gathered()."""
        with torch._C.DisableTorchFunction():
            return self._param._version != self._known

    def note(self) -> None:
        """The parameter was changed in a way that has reached its home, or will."""
        with torch._C.DisableTorchFunction():
            self._known = self._param._version

    def end_graphs(self, revocable: bool = False) -> None:
        """A backward that has saved the parameter itself, and no view of it, fails from here on;
        if that is `revocable`, until revoke()."""
        if revocable:
            keep = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
            self._before = keep(self._param)
        torch.autograd.graph.increment_version(self._param)
        self._own += 1

    def revoke(self) -> None:
        """Such a backward may go on: the values are as before end_graphs()."""
        self._before.__exit__()
        self._before = None
        self._own -= 1
        self.note()


@dataclass(eq=False)
class ManagedParam:
    """A parameter, its place in a chunk, and its state; nothing else assigns `param.data`.

    `.grad` is the placeholder `absent_grad` if the chunk holds a gradient; None if there is none;
    any other tensor was assigned by the user, and is taken into the chunk when it is needed. The
    gradient is what the chunk holds times `grad_factor`. If it was clamped, it was to `grad_limits`
    last.
    """

    param: torch.nn.Parameter
    chunk: Chunk
    slice: ParamSlice
    dtype: torch.dtype
    device: torch.device = _CPU  # where compute happens
    step: int = 0  # optimizer updates made
    numel: int = field(init=False)  # elements
    stand_in: torch.Tensor = field(init=False)
    was_frozen: bool = field(init=False)  # needed no gradient when it got its place
    absent_grad: GradPlaceholder = field(init=False)
    writes: ParamWrites = field(init=False, repr=False)
    grad_factor: float = 1.0
    grad_limits: tuple[float | None, float | None] | None = None
    grad_ops: GradOps | None = field(default=None, repr=False)
    # What `param.data` is, unless user code has pointed it elsewhere (see is_at_home).
    state: ParamState = field(init=False, default=ParamState.UNPLACED)
    # Modules, torch functions and gathered() blocks that use the values now.
    uses: int = field(init=False, default=0)
    _address: int = field(init=False, default=0)  # of what the last transition made param.data
    _guarded: bool = field(init=False, default=False)  # every use counts for itself

    def __post_init__(self) -> None:
        shape, self.numel = self.param.shape, self.slice.param.numel
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self.stand_in = nan.expand(shape)
        self.was_frozen = not self.param.requires_grad
        self.begin_grad()
        self.writes = ParamWrites(self.param)

    @property
    def name(self) -> str:
        """The first name it has in the model."""
        return self.slice.param.name

    @property
    def has_grad(self) -> bool:
        """Whether the chunk holds a gradient of it. Clearing `.grad`, by whomever, clears it."""
        with torch._C.DisableTorchFunction():  # which a parameter's class is asked by
            return self.param.grad is self.absent_grad

    def begin_grad(self) -> None:
        """Another gradient comes than was kept before: what `.grad` was stands for nothing now.

        (Loops that compare gradients of two losses keep those of the first over zero_grad().)
        """
        self.absent_grad = GradPlaceholder.of(self, self.dtype, self.device)
        self.grad_limits = None

    def hold_grad(self) -> None:
        """The chunk holds a gradient of it from now on."""
        with torch._C.DisableTorchFunction():
            self.param.grad = self.absent_grad

    # Transitions

    def _become(self, state: ParamState, data: torch.Tensor, *allowed: ParamState) -> None:
        with _CHANGING:
            assert self.state in allowed, f"{self.name}: {self.state.name} to {state.name}"
            self.state, self._address = state, data.data_ptr()
            become(self.param, data, absent=self._guarded or data is self.stand_in)

    def guard(self, guarded: bool) -> None:
        """While it is guarded it has the class of absent parameters, also if it has its values.

        Its memory stays as it is: another thread may be using it, and while torch makes the graph
        of that use it has a lock of the parameter's, and waits for the GIL. Setting `.data` waits
        for this lock with the GIL held.
        """
        with _CHANGING, torch._C.DisableTorchFunction():
            is_absent = self.param.data_ptr() == self.stand_in.data_ptr()
            self._guarded = guarded
            set_absent(self.param, guarded or is_absent)

    def unload(self) -> None:
        """UNPLACED: the chunk has the first values, so the memory that had them can be freed.

        A backward that was recorded before fails from here on.
        """
        self.writes.end_graphs()
        self._become(ParamState.UNPLACED, self.stand_in, ParamState.UNPLACED)

    def place(self, home: torch.Tensor | None, grad_ops: GradOps) -> None:
        """UNPLACED -> RESIDENT or OFFLOADED: the parameter has got a home.

        `home` is the whole chunk's, flat, if it is where compute happens; else None. What user code
        does to the gradient's placeholder goes to `grad_ops`.
        """
        self.grad_ops = grad_ops
        self._go_home(home, ParamState.UNPLACED)
        self.writes.note()

    def _go_home(self, home: torch.Tensor | None, *allowed: ParamState) -> None:
        if home is None:
            self._become(ParamState.OFFLOADED, self.stand_in, *allowed)
            return
        with torch.inference_mode(False):  # as of a parameter that nobody had to wait for
            self._become(ParamState.RESIDENT, self.part_of(home), *allowed)

    def begin_use(self, copy: torch.Tensor | None) -> None:
        """Counts a use; OFFLOADED -> GATHERED with the first one.

        `copy` is the gathered one of the whole chunk, flat, if the parameter is OFFLOADED; the
        caller pins it until end_use() has made the parameter OFFLOADED again.
        """
        if copy is not None:
            self._become(ParamState.GATHERED, self.part_of(copy), ParamState.OFFLOADED)
        self.uses += 1

    def end_use(self) -> bool:
        """Undoes one begin_use(); GATHERED -> OFFLOADED with the last one.

        Returns:
            Whether user code has changed the gathered copy, which must then be brought home.
        """
        assert self.uses > 0, self.name
        self.uses -= 1
        if self.uses or self.state is not ParamState.GATHERED:
            return False
        self._become(ParamState.OFFLOADED, self.stand_in, ParamState.GATHERED)
        changed = self.writes.are_unnoticed
        self.writes.note()
        return changed

    @contextmanager
    def as_copy(self, values: torch.Tensor | None = None) -> Iterator[None]:
        """COPIED inside the block; `param.data` then is what user code has made of it.

        `values`: a copy of the parameter's, which need not be in memory then.
        """
        state = self.state
        before = self.stand_in if state is ParamState.OFFLOADED else self.param.data
        allowed = {ParamState.RESIDENT, ParamState.GATHERED, ParamState.COPIED}
        if values is not None:
            allowed |= {ParamState.OFFLOADED}
        copy = before.clone() if values is None else values
        self._become(ParamState.COPIED, copy, *allowed)
        try:
            yield
        finally:
            if self.state is ParamState.COPIED:  # (the engine may have been closed in the block)
                self._become(state, before, ParamState.COPIED)
                self.writes.note()

    def note_update(self) -> None:
        """RESIDENT or OFFLOADED: an update changes the home, and step() waits for it.

        A backward over the old values fails from here on, as after an update in place.
        """
        self.writes.end_graphs()
        self.writes.note()

    def begin_update(self, revocable: bool = False) -> None:
        """RESIDENT or OFFLOADED -> UPDATING: its values must not be read until end_update().

        As note_update() otherwise. The parameter is not in use. `revocable`: revoke_update() may
        follow instead.
        """
        assert self.uses == 0, self.name
        self.writes.end_graphs(revocable)
        self._become(ParamState.UPDATING, self.stand_in, ParamState.RESIDENT, ParamState.OFFLOADED)
        self.writes.note()

    def end_update(self, home: torch.Tensor | None) -> None:
        """UPDATING -> RESIDENT or OFFLOADED: the update is made. Idempotent; `home` as in place().

        (Nobody can have changed the parameter meanwhile: who touches it waits.)
        """
        if self.state is ParamState.UPDATING:
            self._go_home(home, ParamState.UPDATING)
            self.writes.note()

    def revoke_update(self, home: torch.Tensor | None) -> None:
        """UPDATING -> RESIDENT or OFFLOADED: its home has the values from before begin_update().

        So a backward that has saved the parameter may go on. `home` as in place().
        """
        self._go_home(home, ParamState.UPDATING)
        self.writes.revoke()

    def begin_move(self) -> None:
        """RESIDENT -> MOVING, so that the home's pins show whether another tensor views it."""
        self._become(ParamState.MOVING, self.stand_in, ParamState.RESIDENT)

    def end_move(self, home: torch.Tensor | None, moved: bool) -> None:
        """MOVING or OFFLOADED -> RESIDENT or OFFLOADED; `home` as in place().

        `moved`: it is another home than before. As after a change, a backward that has saved the
        parameter itself, and no view of it, then fails instead of reading memory that has another
        use.
        """
        self._go_home(home, ParamState.MOVING, ParamState.OFFLOADED)
        if moved:
            self.writes.end_graphs()
            self.writes.note()

    def retire(self) -> None:
        """The parameter has moved to another chunk group, which has a ManagedParam of its own."""
        self.state = ParamState.RETIRED

    def close(self) -> None:
        """The engine is closed: the parameter has no values and no gradient any more."""
        self._become(ParamState.RETIRED, self.stand_in, *ParamState)
        self.param.grad = None

    # Changes by user code

    @property
    def is_moved(self) -> bool:
        """Whether user code has pointed `param.data` elsewhere, as model.to() does."""
        with torch._C.DisableTorchFunction():
            return self.param.data_ptr() != self._address

    @property
    def version(self) -> tuple[int, int]:
        """Differs after every change of the values."""
        return self.step, self.writes.count

    # Its elements

    def in_shard(self, layout: Layout, rank: int | None = None) -> tuple[Range, Range]:
        """Its elements in the shard of its chunk that `rank` (default: this one) has.

        Returns where they are in the shard, and which elements of the flat parameter they are; both
        ranges are empty if the shard has none of them.
        """
        part = layout.shard.range(layout.chunk_numel(self.chunk), rank)
        first = max(self.slice.offset, part.start)
        last = max(first, min(self.slice.end, part.stop))
        offset = self.slice.offset
        return Range(first - part.start, last - part.start), Range(first - offset, last - offset)

    def part_of(self, chunk_flat: torch.Tensor) -> torch.Tensor:
        """A view of its elements in `chunk_flat`, flat over the whole chunk, in its own shape."""
        begin = self.slice.offset
        return chunk_flat[begin : begin + self.numel].view(self.stand_in.shape)
