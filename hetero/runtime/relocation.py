"""Budgets of an engine that change, by the user's wish or to keep a limit; and the moves of homes
to other placements, on all ranks or on none.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.chunk_group import ChunkGroup, DeviceParts, Shared
from hetero.chunks.layout import Chunk
from hetero.planning.group_plans import ChunkGroupPlan, file_checksums, place_groups
from hetero.planning.placement import Budgets, GroupSpec, Placement, PlacementError, SlotBytes
from hetero.planning.refusal import SAID, cannot_become, process_passed, too_much
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.state.managed_param import ManagedParam, ParamState
from hetero.state.memory import Homes
from offload._native import IoOp
from offload.device.backend import Backend
from offload.disk.scratch_file import Extent, checksum_bytes
from offload.errors import BudgetError, HeteroError, PeerError
from offload.memory.ledger import Ledger
from offload.memory.process_memory import (
    margin_bytes,
    peak_resident_bytes,
    resident_bytes,
    trim_heap,
)
from offload.memory.sizes import format_bytes, parse_bytes
from offload.memory.tiers import Account, StateKind, Tier


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
        self._memory = chunk_group.memory
        self._file, self._arenas = self._memory.scratch_space, self._memory.arenas
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
        moves: list[Move] = []
        for kind in StateKind:
            old, new = getattr(self._before, kind.value), getattr(self._after, kind.value)
            moves += [
                Move(kind, c, old[c.id], new[c.id], self._memory.homes[kind])
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
                self._reserve_copies()
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
            if m.writes.are_unnoticed or m.is_moved or not m.state.is_home:
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
        home = self._memory.homes[StateKind.PARAM].resident(chunk)
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

    @property
    def _coming(self) -> set[tuple[Chunk, StateKind]]:
        """What comes to memory from the file."""
        return {(m.chunk, m.state_kind) for m in self._moves if m.of is Tier.DISK}

    def _reserve_copies(self) -> None:
        """Allocates what commits need of the file for homes that come to memory: a commit that
        found no room would end the training. Raises BudgetError."""
        versions = self._chunk_group.updates.versions
        if versions.is_durable:
            versions.reserve_copies(self._coming)

    def durable_checksum_bytes(self) -> int:
        """RAM of the checksums of a durable state's file when its homes have moved: what they leave
        there is not free before the next commit."""
        versions = self._chunk_group.updates.versions
        if not versions.is_durable:
            return 0
        out = [m for m in self._moves if m.of is not Tier.DISK and m.to is not Tier.DEVICE]
        sizes = [self._memory.extent_size(m.state_kind, m.chunk).space_bytes for m in out]
        copies = versions.copies_of(self._coming)
        return checksum_bytes(self._file.length_after(copies, sizes))

    def _write_out(self, ops: list[IoOp]) -> None:
        """Writes what leaves memory to the file; appends the writes under way to `ops`."""
        out = [m for m in self._moves if m.of is not Tier.DISK and m.to is not Tier.DEVICE]
        out = [move for move in out if not move.copied]
        sizes = (self._memory.extent_size(move.state_kind, move.chunk) for move in out)
        self._file.reserve(sum(size.space_bytes for size in sizes))
        grads = self._chunk_group.grads
        for move in out:
            extent = move.written = self._memory.make_extent(move.state_kind, move.chunk)
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

    def _give_back(self, move: Move, extent: Extent) -> None:
        self._memory.free_extent(move.state_kind, move.chunk, extent)

    def abandon(self) -> None:
        """Undoes prepare(); idempotent. Raises BudgetError if room on DEVICE is gone."""
        chunk_group = self._chunk_group
        for move in self._moves:
            if move.written is not None:
                size = self._memory.extent_size(move.state_kind, move.chunk)
                self._file.reuse([(move.written.offset, size.space_bytes)])  # no commit has it
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


_DEVICE_MARGIN = 64  # one part in so many of a device's limit stays free
_TOLD_AGAIN = 64  # the user is told again when a limit is passed by one part in so many more
_RESERVE = 32  # one part in so many of a device: for what its allocator cannot use, and for others


class BesideMemory:
    """Bytes that are not model state: activations, temporaries, libraries, and what the allocator
    keeps.

    In RAM it is RSS without what the ledger has charged, pages that were never touched included;
    so until all memory was used once it is too little. An emulated DEVICE is RAM, and what computes
    there uses beside it is in RAM's figure.
    """

    def __init__(self, ledger: Ledger, backend: Backend) -> None:
        self._peak = peak_resident_bytes()
        self._ledger = ledger
        self._backend = backend
        self._take_managed_peak()  # what was there before is no step's

    def __call__(self) -> tuple[int, int]:
        """(in RAM, on a DEVICE that is not RAM) now."""
        host = resident_bytes() - self.managed_bytes(Tier.HOST)
        return max(0, host), self.device_bytes()

    def new_peak(self) -> tuple[int, int]:
        """The most bytes that the process ever held, if that is more than when it was asked last,
        and how many of them at least were not model state; else (0, 0).

        The kernel counts it, so what a step had for a moment is in it. All that was charged at most
        since then may have been there at that moment.
        """
        peak, before = peak_resident_bytes(), self._peak
        managed_bytes = self._take_managed_peak()
        self._peak = max(peak, before)
        return (peak, max(0, peak - managed_bytes)) if peak > before else (0, 0)

    def _take_managed_peak(self) -> int:
        host = self._ledger.take_peak(Tier.HOST)
        return host + (self._ledger.take_peak(Tier.DEVICE) if self._device_is_ram else 0)

    def device_bytes(self) -> int:
        """The most bytes beside model state on a DEVICE that is not RAM since the last reset()."""
        return self._backend.beside_bytes() if self._backend.separate else 0

    def reset(self) -> None:
        """Restarts the peak measurement that device_bytes() reports."""
        if self._backend.separate:
            self._backend.reset_beside()

    def managed_bytes(self, tier: Tier) -> int:
        """Bytes of the memory that is `tier` which the ledger has charged to any tier."""
        return self._ledger.in_use_bytes[tier.value] + self.shared_bytes(tier)

    @property
    def _device_is_ram(self) -> bool:
        return self._backend.kind == "emulated"

    def shared_bytes(self, tier: Tier) -> int:
        """Of managed_bytes(), those of another tier: an emulated DEVICE is in RAM."""
        if not self._device_is_ram or tier is not Tier.HOST:
            return 0
        return self._ledger.in_use_bytes[Tier.DEVICE.value]


@dataclass
class MemoryLimit:
    """How many bytes of a tier model state may have, so that all stays within a limit.

    That becomes less as soon as a step needed more beside it, by what is missing and a margin. It
    becomes more only once: after the first steps, when what they need is known. So it does not go
    up and down.

    Attributes:
        tier: whose memory the limit is of.
        limit: bytes that all may hold together.
        wanted_bytes: for model state, if the limit allows.
        beside: measures what is not model state.
        was_raised: whether it has become more, or must not.
        peak_bytes: the most beside model state so far.
        told_bytes: the peak of all that the user was told of.
    """

    tier: Tier
    limit: int
    wanted_bytes: int
    beside: BesideMemory
    was_raised: bool = False
    peak_bytes: int = 0
    told_bytes: int = 0

    def is_passed_anew(self, peak: int) -> bool:
        """Whether `peak` bytes are more than may be held, and notably more than the user was told
        of; the user is told now."""
        anew = peak > max(self.limit, self.told_bytes + self.limit // _TOLD_AGAIN)
        if anew:
            self.told_bytes = peak
        return anew

    def passed(self, beside_bytes: int, peak: int, promised_bytes: int) -> bool:
        """Whether a step that had `beside_bytes` beside model state passed the limit, or `peak`
        bytes at any moment; or one would that uses what it was `promised_bytes` of, too."""
        managed_bytes = self.beside.managed_bytes(self.tier) + promised_bytes
        return max(peak, beside_bytes + managed_bytes) > self.limit

    def state_bytes(self, beside_bytes: int, margin: bool = True) -> int:
        """Bytes that model state may have beside `beside_bytes` of anything else, and a margin."""
        others = self.beside.shared_bytes(self.tier)
        free = 0
        if margin:
            is_host = self.tier is Tier.HOST
            free = margin_bytes(self.limit) if is_host else self.limit // _DEVICE_MARGIN
        return min(self.wanted_bytes, self.limit - free - beside_bytes - others)


def usable_device_bytes(backend: Backend) -> int | None:
    """All bytes that a device has but for a reserve; None: the backend does not say."""
    total = backend.device_bytes()
    return None if total is None else total - total // _RESERVE


_FIRST_STEPS = 2  # the first one does things that no other does
_NO_LIMIT = (1 << 63) - 1  # bytes


class ActivationShare:
    """The RAM of saved tensors that nobody has chosen, because activation_memory is "auto".

    They give back what steps do not need, and get what a step lacked, if model state can give way.

    Attributes:
        store: has the saved tensors.
        given_back_bytes: by activations, until budgets are raised.
    """

    def __init__(self, store: ActivationStore, agree: Callable[..., int]) -> None:
        """`agree` finds one number for all ranks."""
        self.store = store
        self._agree = agree
        self._first_bytes = store.limits.host_bytes
        self.given_back_bytes = 0
        self._refused_bytes = 0  # that activations need, and for which there is no placement

    def take_back(self) -> None:
        """Activations give back what steps have not needed of the RAM that was left for them."""
        limits = self.store.limits
        wanted = self._agree(self.store.wanted_host_bytes, max, "activation_memory")
        self.given_back_bytes += max(0, limits.host_bytes - wanted)
        limits.host_bytes = min(limits.host_bytes, wanted)

    def place_with_less(
        self, refusal: PlacementError, left: int, place: Callable[[], list[Placement]]
    ) -> list[Placement]:
        """What `place` gives if activations have less, so that `left` bytes suffice for all.

        Raises `refusal`, or another one, if even the least that they need is too much.
        """
        limits = self.store.limits
        before = limits.host_bytes
        least = self._agree(self.store.least_host_bytes, max, "activation_memory")
        fits = left - (refusal.smallest_host_bytes - before)
        if not least <= fits < before:
            raise refusal
        limits.host_bytes = fits
        try:
            return place()
        except PlacementError:
            limits.host_bytes = before
            raise

    def lacking(self) -> list[int]:
        """Bytes that activations should have to be counted, if one was not for want of room, the
        best first: steps have become larger."""
        least = self._agree(self.store.counts.refused_host_bytes, max, "activation_memory")
        wanted = self._agree(self.store.wanted_host_bytes, max, "activation_memory")
        if least <= max(self.store.limits.host_bytes, self._refused_bytes):
            return []
        return [max(least, min(wanted, self._first_bytes)), least]

    def note_refused(self, nbytes: int) -> None:
        """There is no placement beside so many bytes; 0: there may be one again."""
        self._refused_bytes = nbytes


class BudgetMoves:
    """Chooses placements for other budgets, and moves homes there."""

    def __init__(
        self,
        relocation: Relocation,
        beside: BesideMemory,
        activations: ActivationStore | None = None,
    ) -> None:
        """Nothing has moved yet; `beside` measures what a process and a device hold beside model
        state, of which `activations` have a part that nobody chose if activation_memory is "auto".
        """
        self._relocation, self._beside = relocation, beside
        self._chunk_groups, self._shared = relocation.chunk_groups, relocation.shared
        self._agree = relocation.world.agree
        self._activations = activations
        self._share: ActivationShare | None = None
        if activations is not None and self._shared.config.activation_limit == "auto":
            self._share = ActivationShare(activations, self._agree)
        self._first_chunk_groups = len(self._chunk_groups)
        self.changes: list[Change] = []
        self._steps = 0
        # Optimizer states are kept in RAM that the user has given.
        self._keeps_optim_states = self._shared.config.host_memory is not None
        self.limits = self._make_limits()

    def _make_limits(self) -> dict[Tier, MemoryLimit]:
        """All ranks have the same limits, or none: they ask each other when they have one."""
        found = {}
        for tier, own in (
            (Tier.HOST, self._shared.config.process_bytes(self._relocation.world.local_ranks)),
            (Tier.DEVICE, usable_device_bytes(self._shared.backend)),
        ):
            limit = self._agree(_NO_LIMIT if own is None else own, min, "a limit")
            if limit != _NO_LIMIT:
                wanted = self._shared.config.budget(tier) or limit
                found[tier] = MemoryLimit(tier, limit, wanted, self._beside)
        return found

    # What a process, and a device, hold altogether

    def end_step(self, host_bytes: int, device_bytes: int) -> None:
        """A step is over that had so many bytes beside the model state, in RAM and on DEVICE.

        Raises BudgetError if the process needs more than it may have, with all else done, and
        HeteroError if a move failed that could not be undone.
        """
        device_bytes = max(device_bytes, self._beside.device_bytes())
        needed = {Tier.HOST: host_bytes, Tier.DEVICE: device_bytes}
        peak, beside_bytes = self._beside.new_peak()
        needed[Tier.HOST] = max(host_bytes, beside_bytes)
        if self._shared.excess is not None:
            needed[Tier.HOST] = max(needed[Tier.HOST], self._shared.excess.take_peak_beside())
        self._beside.reset()
        host = self.limits.get(Tier.HOST)
        if host is not None and host.is_passed_anew(peak):
            when = f"in step {self._steps + 1} of this engine"
            self._shared.notes.append(process_passed(host.limit, peak, when))
        if self._activations is not None:  # a graph that somebody keeps would keep it lent
            self._activations.limits.lent_bytes = 0
        self._steps += 1
        refusal = None
        for tier, limit in self.limits.items():
            of_tier = peak if tier is Tier.HOST else 0
            refusal = self._keep_within(limit, needed[tier], of_tier) or refusal
        if self._steps >= _FIRST_STEPS:
            self._raise_once()
        if refusal is not None:
            raise refusal
        if Tier.HOST in self.limits:
            self._give_more()

    def _keep_within(self, limit: MemoryLimit, needed: int, peak: int) -> BudgetError | None:
        """Lowers a budget if its limit is passed, or was in the step that had `needed` beside it,
        and `peak` in all.

        Returns what is to be raised if it cannot be so low.
        """
        agree, tier = self._agree, limit.tier
        needed = agree(needed, max, "memory")
        limit.peak_bytes = max(limit.peak_bytes, needed)
        # What is charged may differ between ranks.
        promised = 0
        if tier is Tier.HOST and self._activations is not None:
            if self._share is not None:
                self._share.take_back()
            limits = self._activations.limits
            promised = max(
                0, limits.host_bytes - self._shared.ledger.used(tier, Account.ACTIVATION)
            )
        if not agree(int(limit.passed(needed, peak, promised)), max, "a limit"):
            return None
        if tier is Tier.HOST:
            trim_heap()  # what the allocator keeps counts, too
        before = self._shared.ledger.budget_bytes[tier.value] or 0
        refused: BudgetError | None = None
        for margin in (True, False):  # rather without one than not at all
            left = agree(limit.state_bytes(needed, margin), min, "a budget")
            try:
                placements = self._place_within(tier, max(1, left))
            except PlacementError as refusal:
                refused = BudgetError(too_much(tier, limit.limit, needed, left, refusal))
            else:
                # If it cannot be now, the next step tries again.
                self._change(placements, {tier: left}, _why(tier, needed, left, before))
                return None
        return refused

    def _place_within(self, tier: Tier, left: int) -> list[Placement]:
        """A placement with `left` bytes of a tier, of which activations have less than before if
        that is what it takes and nobody has chosen what they have. Raises PlacementError."""
        try:
            return self._place(self._budgets({tier: left}))
        except PlacementError as refusal:
            if tier is not Tier.HOST or self._share is None:
                raise
            place = lambda: self._place(self._budgets({tier: left}))  # noqa: E731
            return self._share.place_with_less(refusal, left, place)

    def _give_more(self) -> None:
        """Activations get what they lack. Model state gives way, if it has a placement then."""
        share = self._share
        if share is None or self._shared.backend.separate:  # there the device has no room
            return
        limits = share.store.limits
        before, lacking = limits.host_bytes, share.lacking()
        for nbytes in lacking:
            limits.host_bytes = nbytes
            try:
                placements = self._place(self._budgets({}))
            except PlacementError:
                continue
            why = f"saved tensors need {format_bytes(nbytes)}, and had {format_bytes(before)}"
            stays = all(map(same, self._placements(), placements))
            if not stays and self._change(placements, {}, why) is not None:
                limits.host_bytes = before  # the next step tries again
            return
        limits.host_bytes = before
        if lacking:
            share.note_refused(lacking[-1])

    def _raise_once(self) -> None:
        """Budgets of which a part was left for what steps need become what steps have shown."""
        for tier, limit in self.limits.items():
            if limit.was_raised:
                continue
            before = self._shared.ledger.budget_bytes[tier.value] or 0
            allowed = self._agree(limit.state_bytes(limit.peak_bytes), min, "a budget")
            limit.was_raised = True
            gave_back = tier is Tier.HOST and self._share and self._share.given_back_bytes
            if allowed <= before and not gave_back:
                continue
            allowed = max(allowed, before)
            try:
                placements = self._place(self._budgets({tier: allowed}))
            except PlacementError:  # with more of this, more is needed of what there is no more of
                continue
            if not all(map(same, self._placements(), placements)):
                why = _why(tier, limit.peak_bytes, allowed, before)
                failure = self._change(placements, {tier: allowed}, why)
                limit.was_raised = not isinstance(failure, InUseError)  # else the next step tries

    def _change(
        self, placements: Sequence[Placement], wanted: Mapping[Tier, int], why: str
    ) -> Exception | None:
        """Moves homes and notes it; or notes, and returns, what prevented it.

        The step was made: an error would tell the user to make it again. It is raised if a move
        failed that could not be undone.
        """
        before, notes = self._placements(), self._shared.notes
        try:
            self._go_over(placements, wanted, why)
        except (HeteroError, OSError) as error:
            if isinstance(error, PeerError) or self._placements() != before:
                raise
            note = f"homes could not move, although {why}: {error}"
            if not isinstance(error, InUseError) and note not in notes:
                notes.append(note)
            return error
        notes.append(self.changes[-1].words())
        return None

    def _go_over(
        self, placements: Sequence[Placement], wanted: Mapping[Tier, int], why: str
    ) -> None:
        """Moves homes, and remembers it. Raises as Relocation.go_over()."""
        try:
            moved = self._relocation.go_over(placements, wanted)
        finally:
            self._beside.reset()  # what it took meanwhile is no step's
        self.changes.append(Change(self._steps, why, moved))

    # The user's wish

    def set_budget(
        self, host_memory: int | str | None = None, device_memory: int | str | None = None
    ) -> None:
        """Engine.set_budget(). Raises ValueError if neither is given, or one is no size."""
        wanted: dict[Tier, int] = {}
        for tier, value in ((Tier.HOST, host_memory), (Tier.DEVICE, device_memory)):
            if value is not None:
                try:
                    wanted[tier] = parse_bytes(value)
                except ValueError as error:
                    raise ValueError(f"{tier.value}_memory: {error}") from None
        if not wanted:
            raise ValueError("set_budget() needs host_memory, device_memory, or both")
        wanted = {t: self._agree(nbytes, min, "a budget") for t, nbytes in wanted.items()}
        keeps = self._keeps_optim_states or Tier.HOST in wanted
        budgets = replace(self._budgets(wanted), keep_optim_states=keeps)
        try:
            placements = self._place(budgets)
        except PlacementError as refusal:
            policy = self._shared.config.placement_policy
            raise BudgetError(cannot_become(wanted, budgets, policy, refusal)) from None
        if self._share is not None:
            self._share.note_refused(0)
        words = [f"{t.value}_memory={format_bytes(nbytes)}" for t, nbytes in wanted.items()]
        self._go_over(placements, wanted, f"set_budget({', '.join(words)})")
        self._keeps_optim_states = keeps
        # The user has decided: it is lowered if it must be, and not raised.
        for tier, limit in self.limits.items():
            if tier in wanted:
                limit.was_raised = True
                limit.wanted_bytes = wanted[tier]

    # Placements

    def _placements(self) -> list[Placement]:
        """Where the chunk groups are now."""
        return [chunk_group.placement for chunk_group in self._chunk_groups]

    def group_plans(self) -> list[ChunkGroupPlan]:
        """The chunk groups as they are placed, each with the budgets that the later ones leave."""
        left = self._budgets({})
        plans = []
        for chunk_group in reversed(self._chunk_groups):
            (spec,) = self._specs(chunk_group, left)
            plans.append(ChunkGroupPlan(spec, chunk_group.placement))
            left = left.minus(chunk_group.placement, spec.slot)
        return plans[::-1]

    def _place(self, budgets: Budgets) -> list[Placement]:
        """A placement for each chunk group. Raises PlacementError if nothing fits.

        Moving there may make files of a durable state longer, so checksums take more RAM than the
        placement counts on; then one is looked for that counts on so much. (A rank's file may be
        longer than another's, by a move that only this one could prepare.)
        """
        held = [
            self._agree(group.memory.scratch_space.checksum_bytes, max, "a file")
            for group in self._chunk_groups
        ]
        while True:
            groups = [
                partial(self._specs, chunk_group, held_bytes=held_bytes)
                for chunk_group, held_bytes in zip(self._chunk_groups, held, strict=True)
            ]
            placements = [plan.placement for plan in place_groups(groups, budgets)]
            if not self._shared.config.durable:
                return placements
            moved = [*map(Migration, self._chunk_groups, placements)]
            needed = [
                self._agree(max(before, migration.durable_checksum_bytes()), max, "a file")
                for before, migration in zip(held, moved, strict=True)
            ]
            if needed == held:
                return placements
            held = needed

    def _specs(
        self, chunk_group: ChunkGroup, budgets: Budgets, held_bytes: int = 0
    ) -> list[GroupSpec]:
        """The one spec with which the chunk group can be placed within `budgets`; its file
        will have `held_bytes` of checksums, if that is more than it has."""
        held_bytes = max(held_bytes, chunk_group.memory.scratch_space.checksum_bytes)
        checksums = file_checksums(self._shared.config, held_bytes)
        return [replace(chunk_group.plan.spec, budgets=budgets, checksums=checksums)]

    def _budgets(self, wanted: Mapping[Tier, int]) -> Budgets:
        """The engine's budgets, but for those that are `wanted`."""
        later = self._chunk_groups[self._first_chunk_groups :]
        reserved = self._shared.config.reserve_bytes - sum(
            group.placement.host_bytes for group in later
        )
        return replace(
            budgets_of(self._shared, wanted),
            keep_optim_states=self._keeps_optim_states,
            reserved_host=max(0, reserved),
        )


def budgets_of(shared: Shared, wanted: Mapping[Tier, int]) -> Budgets:
    """An engine's budgets, but for those that are `wanted`, for what is placed from now on."""
    limits = {tier: shared.ledger.budget_bytes[tier.value] for tier in Tier} | dict(wanted)
    separate, device = shared.backend.separate, limits[Tier.DEVICE]
    activations, used = shared.activations, shared.ledger.used
    return Budgets(
        host=limits[Tier.HOST] or 0,
        disk=limits[Tier.DISK] or 0,
        gathered=None if separate else device,
        device=device if separate else None,
        keep_optim_states=shared.config.host_memory is not None,
        taken_host=used(Tier.HOST, Account.UNMANAGED),
        taken_device=used(Tier.DEVICE, Account.UNMANAGED),
        activations_host=0 if activations is None else activations.host_bytes,
        activations_device=0 if activations is None else activations.device_bytes,
        under_construction=False,
    )


def _why(tier: Tier, needed: int, left: int, before: int) -> str:
    owner, budget = SAID[tier]
    return (
        f"the {owner} needs {format_bytes(needed)} for more than model state, so {budget} is "
        f"{format_bytes(left)} instead of {format_bytes(before)}"
    )
