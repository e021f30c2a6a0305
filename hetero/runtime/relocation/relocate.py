"""Moves the homes of an engine's chunk groups to other placements, on all ranks or on none."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero.chunk_groups.chunk_group import ChunkGroup, DeviceParts, Shared
from hetero.chunks.layout import Chunk
from hetero.planning.placement import Placement, SlotBytes
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.state.managed_param import ManagedParam, ParamState
from hetero.state.memory.homes import ExtentSize, Homes, extent_size, name_of
from offload._native import IoOp
from offload.disk.scratch_file import Extent
from offload.errors import BudgetError, HeteroError
from offload.memory.sizes import format_bytes
from offload.memory.tiers import StateKind, Tier


class InUseError(HeteroError):
    """Something that would have to move is in use; it may be free later."""


@dataclass(eq=False)
class Move:
    """One kind of state of one chunk gets a home on another tier.

    `homes` are those of its state kind. `written` is where in the file
    it was written to, `copied` whether it has a second home.
    """

    state_kind: StateKind
    chunk: Chunk
    of: Tier
    to: Tier
    homes: Homes
    written: Extent | None = None
    copied: bool = False


class Migration:
    """Moves one chunk group's homes from its present placement to another one."""

    def __init__(self, chunk_group: ChunkGroup, after: Placement) -> None:
        """Moves nothing yet: call prepare(), leave() and arrive(), or abandon() before leave()."""
        self._chunk_group = chunk_group
        self._before, self._after = chunk_group.placement, after
        self._file = chunk_group.memory.scratch_space
        self._arenas = chunk_group.memory.arenas
        self._grad_reducer = None if chunk_group.ranks is None else chunk_group.ranks.grad_reducer
        self._moves = self._plan_moves()
        self._stayed: list[Move] = []  # what should have come to RAM and could not be read
        self._moving: list[Chunk] = []  # whose parameters are in state MOVING
        # Without parameters that another chunk group has by now.
        self._members: dict[int, list[ManagedParam]] = {c.id: [] for c in chunk_group.layout.chunks}
        for m in chunk_group.members:
            if m.state is not ParamState.RETIRED:
                self._members[m.chunk.id].append(m)

    def _plan_moves(self) -> list[Move]:
        """The kinds of state whose tier differs between the two placements, chunk by chunk."""
        memory, moves = self._chunk_group.memory, []
        for kind in StateKind:
            old, new = getattr(self._before, kind.value), getattr(self._after, kind.value)
            moves += [
                Move(kind, c, old[c.id], new[c.id], memory.homes[kind])
                for c in self._chunk_group.layout.chunks
                if old[c.id] is not new[c.id]
            ]
        return moves

    @property
    def moved_bytes(self) -> Counter[tuple[Tier, Tier]]:
        """Bytes of the homes that move, by (tier before, tier after)."""
        found: Counter[tuple[Tier, Tier]] = Counter()
        slot = SlotBytes.of(self._chunk_group.layout, self._chunk_group.dtypes)
        for move in self._moves:
            found[move.of, move.to] += move.chunk.slots * getattr(slot, move.state_kind.value)
        return found

    def prepare(self) -> None:
        """Writes or copies the homes that leave memory, or come to DEVICE, to where they go.

        To be called between steps, outside of gathered(), when no graph is alive.

        Raises:
            InUseError: a home, or a copy, is in use.
            BudgetError, StoreError: there is no file space, or no room for second homes.
            OSError: a transfer failed. Nothing is changed in any case.
        """
        chunk_group = self._chunk_group
        self._require_idle()
        for move in self._moves:
            if move.state_kind is StateKind.PARAM:
                self._require_unchanged(move.chunk)
        with chunk_group.optim_states.lock:
            self._quiesce()
            ops: list[IoOp] = []
            try:
                for move in self._moves:
                    if move.of is not Tier.DISK:
                        self._drop_views(move)
                self._allocate_ram()
                self._write_out(ops)
                self._copy_to_ram()
                self._copy_to_device()
                for op in ops:
                    op.wait()
            except BaseException:
                for op in ops:
                    with contextlib.suppress(Exception):
                        op.wait()  # its memory and its place in the file get another use
                self.abandon()
                raise

    def _require_idle(self) -> None:
        chunk_group = self._chunk_group
        why = None
        if any(m.uses for m in chunk_group.members) or chunk_group.params.copies.pinned():
            why = "parameters are gathered"
        elif self._grad_reducer is not None and not self._grad_reducer.means.is_idle:
            why = "gradients wait to be averaged over the ranks"
        if why is not None:
            raise InUseError(
                f"homes cannot move now: {why}; call it between steps, outside of "
                f"hetero.gathered() and hetero.no_sync(), when no tensor of a graph is left"
            )

    def _require_unchanged(self, chunk: Chunk) -> None:
        """Raises InUseError if user code has put other values where the chunk's belong."""
        for m in self._members[chunk.id]:
            if m.writes.are_unnoticed or not m.is_at_home:
                raise InUseError(
                    f"{m.name} cannot get another home: it was moved, or changed in place, outside "
                    f"of hetero.gathered(..., modifier_rank=0)"
                )

    def _detach(self, chunk: Chunk) -> bool:
        """Points a resident chunk's parameters away from its home.

        Returns whether no graph has saved one of them itself, which the pins do not show.
        """
        if not self._chunk_group.params.is_resident(chunk):
            return True
        self._moving.append(chunk)
        for m in self._members[chunk.id]:
            m.begin_move()
        return not any(map(_in_a_graph, self._members[chunk.id]))

    def _attach(self, chunk: Chunk, moved: bool) -> None:
        """Points the chunk's parameters to where they are used now."""
        home = self._chunk_group.memory.homes[StateKind.PARAM].resident(chunk)
        for m in self._members[chunk.id]:
            if m.state is not ParamState.RESIDENT:  # (one is if Ctrl-C came in _detach())
                m.end_move(home, moved)

    def _quiesce(self) -> None:
        """Waits for all transfers, and brings the latest values home."""
        chunk_group = self._chunk_group
        self._arenas.pipeline.wait_updated()
        self._arenas.forget_read_ahead()
        chunk_group.params.copies.clear()
        chunk_group.grads.slots.flush()
        if self._grad_reducer is not None:
            self._grad_reducer.means.release_views()
        if chunk_group.device is not None:
            chunk_group.device.backend.synchronize()

    @property
    def _device(self) -> DeviceParts:
        assert self._chunk_group.device is not None
        return self._chunk_group.device

    def _drop_views(self, move: Move) -> None:
        """Drops own views of a home that is to move. Raises InUseError if there are others."""
        chunk, chunk_group = move.chunk, self._chunk_group
        free = True
        if move.state_kind is StateKind.PARAM:
            free = self._detach(chunk)
            chunk_group.params.copies.drop(chunk)  # a device may be copying from it
        if not (move.homes.release_view(chunk) and free):
            raise InUseError(
                f"the {move.state_kind.name} of {chunk.name} cannot move from {move.of.name} to "
                f"{move.to.name}: a tensor of yours, or of a graph whose backward was not made, "
                f"still views it"
            )

    def _allocate_ram(self) -> None:
        """Allocates second homes for what comes from DEVICE to RAM, as far as there is room.

        The rest goes through the file. Raises BudgetError if there is none.
        """
        for move in self._moves:
            if (move.of, move.to) == (Tier.DEVICE, Tier.HOST):
                try:
                    move.homes.allocate(move.chunk, Tier.HOST)
                except BudgetError as error:
                    if self._file.is_possible:
                        continue
                    raise BudgetError(
                        f"while homes move, the {move.state_kind.name} of {move.chunk.name} has no "
                        f"room in RAM, and there is no nvme_path: {error}"
                    ) from None
                move.copied = True

    def _write_out(self, ops: list[IoOp]) -> None:
        """Writes what leaves memory to the file; appends the writes under way to `ops`."""
        out = [m for m in self._moves if m.of is not Tier.DISK and m.to is not Tier.DEVICE]
        out = [move for move in out if not move.copied]
        self._file.reserve(sum(self._size(move).space_bytes for move in out))
        grads = self._chunk_group.grads
        for move in out:
            size = self._size(move)
            offset = self._file.allocate(size.space_bytes)
            extent = move.written = Extent(offset, size.transfer_bytes, move.chunk.slots)
            self._file.name(offset, size.space_bytes, name_of(move.state_kind, move.chunk))
            if move.state_kind is StateKind.GRAD and not grads.leaves_memory(move.chunk):
                continue  # there is nothing worth keeping
            home = move.homes.bytes(move.chunk)[: extent.nbytes]
            if move.of is Tier.HOST:
                ops.append(self._file.write(home.data_ptr(), extent.nbytes, extent.offset))
            else:
                self._device.home_copier.to_file(home, extent.offset)

    def _copy_to_ram(self) -> None:
        """Copies what comes from DEVICE to its second homes in RAM."""
        for move in self._moves:
            if move.copied and self._has_bytes(move):
                to = move.homes.bytes(move.chunk, second=True)
                self._device.home_copier.to_ram(move.homes.bytes(move.chunk), to)

    def _copy_to_device(self) -> None:
        """Copies what comes to DEVICE to second homes there, in the room of slots that it frees."""
        moves = [move for move in self._moves if move.to is Tier.DEVICE]
        if not moves:
            return
        if self._device.updater is not None:
            self._device.updater.prepare()
        self._arenas.resize_gathered(0)
        self._arenas.resize_unkept(min(self._before.unkept_slots, self._after.unkept_slots))
        for move in moves:
            move.homes.allocate(move.chunk, Tier.DEVICE)
            move.copied = True
        for move in moves:
            if self._has_bytes(move):
                to = move.homes.bytes(move.chunk, second=True)
                if move.of is Tier.HOST:
                    self._device.home_copier.from_ram(move.homes.bytes(move.chunk), to)
                else:
                    extent = move.homes.extents[move.chunk.id]
                    self._device.home_copier.from_file(extent.offset, to[: extent.nbytes])

    def _has_bytes(self, move: Move) -> bool:
        """Whether the home that moves has values: a gradient may not be there."""
        grads = self._chunk_group.grads
        return move.state_kind is not StateKind.GRAD or grads.comes_to_memory(move.chunk)

    def _size(self, move: Move) -> ExtentSize:
        chunk_group = self._chunk_group
        return extent_size(chunk_group.layout, chunk_group.dtypes, move.state_kind, move.chunk)

    def _give_back(self, move: Move, extent: Extent) -> None:
        self._file.free(extent.offset, self._size(move).space_bytes)

    def abandon(self) -> None:
        """Undoes prepare(); idempotent. Raises BudgetError if room on DEVICE is gone."""
        chunk_group = self._chunk_group
        for move in self._moves:
            if move.written is not None:
                self._give_back(move, move.written)
                move.written = None
            move.homes.free_second(move.chunk)
            move.copied = False
        for chunk in self._moving:
            self._attach(chunk, moved=False)
        self._moving.clear()
        if self._arenas.unkept.slots < self._before.unkept_slots:
            self._arenas.resize_unkept(self._before.unkept_slots)
        if self._arenas.gathered.slots < self._before.gathered_slots:
            self._arenas.resize_gathered(self._before.gathered_slots)
            chunk_group.params.copies.cache.refit()

    def leave(self) -> None:
        """Makes second homes the homes, and frees all slots and the memory of homes that left."""
        for move in self._moves:
            if move.written is not None:
                move.homes.extents[move.chunk.id] = move.written
                move.homes.free(move.chunk)
            elif move.copied:
                move.homes.switch(move.chunk)
                if move.of is Tier.DISK:
                    self._give_back(move, move.homes.extents.pop(move.chunk.id))
        self._arenas.free()
        if self._grad_reducer is not None:
            self._grad_reducer.means.resize(0, 0)

    def arrive(self, spare_bytes: int) -> BaseException | None:
        """Reads what comes to RAM, and allocates slots; returns the first error, or None.

        What cannot be read stays in the file; the chunk group works nevertheless, if RAM suffices
        for the slots which that takes. `spare_bytes` of RAM, on which no placement counts, are for
        gathered copies while they are free.
        """
        chunk_group, error = self._chunk_group, self._read_in()
        made = self._after
        for move in self._stayed:
            tiers = list(getattr(made, move.state_kind.value))
            tiers[move.chunk.id] = Tier.DISK
            made = replace(made, **{move.state_kind.value: tuple(tiers)})  # type: ignore[arg-type]
        if error is not None:
            made = self._with_slots_for(made)
        try:
            self._arenas.allocate(made, spare_bytes)
            if self._grad_reducer is not None:
                self._grad_reducer.means.resize(made.bucket_slots, made.receive_slots)
        except BaseException as failure:
            error = error or failure
        if chunk_group.device is not None:
            chunk_group.device.grad_offload.limit_bytes = made.grad_offload_bytes
        chunk_group.params.note_slots(made.gathered_slots)
        chunk_group.grads.slots.cache.refit()
        for move in self._moves:
            if move.state_kind is StateKind.PARAM:
                self._attach(move.chunk, moved=True)
        chunk_group.note_placement(made)
        return error

    def _read_in(self) -> BaseException | None:
        """Reads what comes from the file to RAM. Returns the first error, or None."""
        first_error: BaseException | None = None
        reads: list[tuple[Move, IoOp | None]] = []
        for move in self._moves:
            if move.to is not Tier.HOST or (move.of is not Tier.DISK and move.written is None):
                continue
            extent = move.homes.extents[move.chunk.id]
            try:
                move.homes.allocate(move.chunk, Tier.HOST)
                op = None
                if self._has_bytes(move):
                    address = move.homes.bytes(move.chunk, second=True).data_ptr()
                    op = self._file.read(address, extent.nbytes, extent.offset)
                reads.append((move, op))
            except BaseException as error:
                move.homes.free_second(move.chunk)
                self._stayed.append(move)
                first_error = first_error or error
        for move, op in reads:
            try:
                if op is not None:
                    op.wait()
            except BaseException as error:
                move.homes.free_second(move.chunk)
                self._stayed.append(move)
                first_error = first_error or error
            else:
                move.homes.switch(move.chunk)
                self._give_back(move, move.homes.extents.pop(move.chunk.id))
        return first_error

    def _with_slots_for(self, made: Placement) -> Placement:
        """`made` with enough slots for all that is on DISK now, whether it was to stay or not."""
        names = ["grad_slots", "buffers", "shard_slots", "staged_slots"]
        if self._chunk_group.device is None:
            names.append("gathered_slots")
        most = {name: max(getattr(self._before, name), getattr(made, name)) for name in names}
        if self._chunk_group.device is not None and Tier.DISK in made.param:
            longest = max(c.slots for c in self._chunk_group.layout.chunks)
            most["shard_slots"] = max(most["shard_slots"], longest)
        if Tier.DISK in made.grad:
            most["grad_slots"] = max(most["grad_slots"], made.longest_trained)
        if made.trained_param_on_disk or Tier.DISK in (*made.grad, *made.optim_state):
            most["buffers"] = max(most["buffers"], 1)
        return replace(made, **most)


def _in_a_graph(managed: ManagedParam) -> bool:
    """Whether autograd has saved the parameter itself, which the pins on its home do not show.

    Besides a graph, Python refers to it, and the node that accumulates its gradient, which the
    engine keeps.
    """
    count = managed.param._use_count()  # type: ignore[attr-defined]
    return bool(count > (2 if managed.chunk.trainable else 1))


# Bytes of homes by where they were and where they are.
Routes = Counter[tuple[Tier, Tier]]


@dataclass(frozen=True)
class Change:
    """Homes that moved.

    Attributes:
        step: after which step, from 1.
        why: in words.
        routes: bytes by where they were and where they are.
    """

    step: int
    why: str
    routes: Routes

    @property
    def moved_bytes(self) -> int:
        """Of all routes together."""
        return self.routes.total()

    def words(self) -> str:
        """A sentence for people."""
        ways = ", ".join(
            f"{format_bytes(n)} from {of.name} to {to.name}" for (of, to), n in self.routes.items()
        )
        return f"after step {self.step} homes moved ({ways or 'none'}): {self.why}"


class Relocation:
    """Carries out what was chosen, within the larger of the old and the new budgets."""

    def __init__(
        self,
        params: ParamRegistry,
        shared: Shared,
        pause: Callable[[], None],
        homes_moved: Callable[[], None],
    ) -> None:
        """Nothing has moved yet.

        Args:
            params: whose homes move; more of them may come.
            pause: waits until no update is under way. Raises InUseError while a forward is running.
            homes_moved: called when homes are elsewhere; whatever knows of them must look again.
        """
        self.chunk_groups = params.chunk_groups
        self.shared = shared
        self.world = self.chunk_groups[0].world
        self._params = params
        self._pause = pause
        self._homes_moved = homes_moved

    def go_over(self, placements: Sequence[Placement], wanted: Mapping[Tier, int]) -> Routes:
        """Moves homes until the chunk groups are placed as wanted; returns what has moved.

        Args:
            placements: one per chunk group.
            wanted: budgets in bytes that hold from then on.

        Raises:
            InUseError, BudgetError, StoreError, OSError: nothing is changed.
            HeteroError: another rank met one of these; or a read failed, after which what could not
                be read stays on NVMe.
        """
        ledger = self.shared.ledger
        before = {tier: ledger.budget_bytes[tier.value] for tier in wanted}
        self._pause()
        self._together(None)  # nobody asks for anything any more
        self._params.forget_gathers()
        for chunk_group in self.chunk_groups:
            # Copies beyond the plan, of one rank perhaps, need RAM.
            chunk_group.params.copies.cache.shrink()
        for tier, nbytes in wanted.items():
            old = before[tier]
            if old is not None and nbytes > old:
                ledger.set_budget(tier, nbytes)
        try:
            return self._migrate(placements, wanted)
        except BaseException:
            self.shared.backend.trim()  # of second homes that were freed
            for tier, old in before.items():
                if old is not None and ledger.in_use_bytes[tier.value] <= old:
                    ledger.set_budget(tier, old)
            raise

    def _migrate(self, placements: Sequence[Placement], wanted: Mapping[Tier, int]) -> Routes:
        ledger = self.shared.ledger
        host_bytes = wanted.get(Tier.HOST, ledger.budget_bytes[Tier.HOST.value] or 0)
        spare_bytes = host_bytes - sum(made.host_bytes for made in placements)
        migrations = [
            Migration(chunk_group, made)
            for chunk_group, made in zip(self.chunk_groups, placements, strict=True)
            if not same(chunk_group.placement, made)
        ]
        self._prepare(migrations)
        failure: BaseException | None = None
        moved: Routes = Counter()
        for migration in migrations:
            migration.leave()
        if migrations:
            self.shared.backend.trim()
        for migration in migrations:
            error = migration.arrive(spare_bytes)
            failure = failure or error
            moved += migration.moved_bytes
        self._homes_moved()
        for tier, nbytes in wanted.items():
            try:
                ledger.set_budget(tier, nbytes)
            except BudgetError as error:
                failure = failure or error
        self._together(failure)
        self._params.begin_gathers()
        return moved

    def _prepare(self, migrations: Sequence[Migration]) -> None:
        """All migrations of all ranks, or none."""
        begun: list[Migration] = []
        failure: Exception | None = None
        try:
            try:
                for migration in migrations:
                    migration.prepare()
                    begun.append(migration)
            except Exception as error:
                failure = error
            self._together(failure)
        except BaseException:
            for migration in begun:
                migration.abandon()
            raise

    def _together(self, failure: BaseException | None) -> None:
        """Returns when no rank has met a failure; raises as ProcessGroups.all_or_none()."""
        if self.world.everyone is not None:
            self._params.finish_transfers("moving homes")
        self.world.all_or_none(failure, "move homes", (InUseError,))


def same(one: Placement, other: Placement) -> bool:
    """Whether homes and slots are the same; bytes may differ by what construction took."""
    return replace(one, host_bytes=0) == replace(other, host_bytes=0)
