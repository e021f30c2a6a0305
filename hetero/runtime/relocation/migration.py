"""Moving chunks' homes between DEVICE, RAM and the file, between steps; bits do not change.

A migration has three parts, so that several chunk groups, and ranks, can go through them together
and the budgets hold in between:

prepare    what leaves memory is written to the file, or copied to a second home in RAM; what comes
           to DEVICE is copied to a second home there, for which slots there are given up. Until all
           of it is there nothing has changed, and abandon() makes it as it was.
leave      second homes become homes; memory is given back: of homes that left, and all slots.
arrive     what comes from the file to RAM is read; slots get their new sizes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace

from hetero.chunk_groups.movable import InUseError, Link, Movable, Move, StateKind, moves_between
from hetero.planning.placement import Placement, SlotBytes
from hetero.runtime.relocation.seats import Seats
from hetero.state.file_layout import extent_sizes
from offload._native import IoOp
from offload.disk.backing import Extent
from offload.errors import BudgetError
from offload.memory.tiers import Tier


class Migration:
    """One chunk group's way from a placement to another."""

    def __init__(self, chunk_group: Movable, before: Placement, after: Placement) -> None:
        self._chunk_group = chunk_group
        self._before, self._after = before, after
        self._moves = moves_between(chunk_group.layout, before, after)
        self._written: dict[Move, Extent] = {}
        self._copied: list[Move] = []  # to second homes
        self._stayed: list[Move] = []  # what should have come to RAM and could not be read
        self._slot = SlotBytes.of(chunk_group.layout, chunk_group.dtypes)
        self._seats = Seats(chunk_group)

    @property
    def moved_bytes(self) -> Counter[tuple[Tier, Tier]]:
        """Of homes, by where they were and where they are."""
        found: Counter[tuple[Tier, Tier]] = Counter()
        for move in self._moves:
            nbytes = move.chunk.slots * getattr(self._slot, move.state_kind.value)
            found[move.of, move.to] += nbytes
        return found

    def prepare(self) -> None:
        """Brings what leaves where it goes. Between steps, outside of gathered(), with no graph
        alive.

        Raises InUseError for what is in use, BudgetError or StoreError for want of file space or of
        room to move in, an OSError if a transfer failed; with nothing changed.
        """
        chunk_group = self._chunk_group
        self._require_idle()
        for move in self._moves:
            if move.state_kind is StateKind.PARAM:
                self._seats.require_in_place(move.chunk)
        with chunk_group.optim_states.lock:
            self._quiesce()
            ops: list[IoOp] = []
            try:
                for move in self._moves:
                    if move.of is not Tier.DISK:
                        self._let_go(move)
                self._take_ram()
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
        if chunk_group.params.in_use:
            why = "parameters are gathered"
        elif chunk_group.buckets is not None and not chunk_group.buckets.is_idle:
            why = "gradients wait to be averaged over the ranks"
        if why is not None:
            raise InUseError(
                f"homes cannot move now: {why}; call it between steps, outside of "
                f"hetero.gathered() and hetero.no_sync(), when no tensor of a graph is left"
            )

    def _quiesce(self) -> None:
        """Nothing is under way any more, and homes alone have the latest."""
        chunk_group = self._chunk_group
        chunk_group.pools.pipeline.wait_updated()
        chunk_group.pools.pipeline.forget()
        for cache in chunk_group.caches:
            cache.clear()
        chunk_group.grads.flush()
        if chunk_group.buckets is not None:
            chunk_group.buckets.let_go()
        if chunk_group.link is not None:
            chunk_group.link.backend.synchronize()

    @property
    def _link(self) -> Link:
        assert self._chunk_group.link is not None
        return self._chunk_group.link

    def _let_go(self, move: Move) -> None:
        """Raises InUseError if somebody views the home that is to move."""
        chunk, chunk_group = move.chunk, self._chunk_group
        free = True
        if move.state_kind is StateKind.PARAM:
            free = self._seats.leave(chunk)
            chunk_group.params.drop_copies(chunk)  # a device may be copying from it
        if not (chunk_group.homes[move.state_kind].let_go(chunk) and free):
            raise InUseError(
                f"the {move.state_kind.name} of {chunk.name} cannot move from {move.of.name} to "
                f"{move.to.name}: a tensor of yours, or of a graph whose backward was not made, "
                f"still views it"
            )

    def _take_ram(self) -> None:
        """Second homes for what comes from DEVICE to RAM; what has no room goes to the file."""
        for move in self._moves:
            if (move.of, move.to) == (Tier.DEVICE, Tier.HOST):
                try:
                    self._chunk_group.homes[move.state_kind].take(move.chunk, Tier.HOST)
                except BudgetError as error:
                    if self._chunk_group.file.is_possible:
                        continue
                    raise BudgetError(
                        f"while homes move, the {move.state_kind.name} of {move.chunk.name} has no "
                        f"room in RAM beside what is there, and there is no nvme_path: {error}"
                    ) from None
                self._copied.append(move)

    def _write_out(self, ops: list[IoOp]) -> None:
        """Writes what leaves memory, or starts to: `ops`."""
        chunk_group, copied = self._chunk_group, set(self._copied)
        out = [m for m in self._moves if m.of is not Tier.DISK and m.to is not Tier.DEVICE]
        out = [move for move in out if move not in copied]
        chunk_group.file.make_room(sum(map(self._space, out)))
        for move in out:
            extent = self._written[move] = self._new_extent(move)
            if move.state_kind is StateKind.GRAD and not chunk_group.grads.leaves_memory(
                move.chunk
            ):
                continue  # there is nothing worth keeping
            home = chunk_group.homes[move.state_kind].bytes(move.chunk)[: extent.nbytes]
            if move.of is Tier.HOST:
                ops.append(chunk_group.file.write(home.data_ptr(), extent.nbytes, extent.offset))
            else:
                self._link.home_copier.to_file(home, extent.offset)

    def _copy_to_ram(self) -> None:
        """What comes from DEVICE to second homes in RAM."""
        for move in self._copied:
            home = self._chunk_group.homes[move.state_kind]
            if self._has_bytes(move):
                to = home.bytes(move.chunk, second=True)
                self._link.home_copier.to_ram(home.bytes(move.chunk), to)

    def _copy_to_device(self) -> None:
        """What comes to DEVICE, to second homes there, for which slots make room."""
        chunk_group = self._chunk_group
        moves = [move for move in self._moves if move.to is Tier.DEVICE]
        if not moves:
            return
        if self._link.updater is not None:
            self._link.updater.prepare()
        chunk_group.pools.fill_gathered(0)
        for move in moves:
            chunk_group.homes[move.state_kind].take(move.chunk, Tier.DEVICE)
            self._copied.append(move)
        for move in moves:
            if self._has_bytes(move):
                homes = chunk_group.homes[move.state_kind]
                to = homes.bytes(move.chunk, second=True)
                if move.of is Tier.HOST:
                    self._link.home_copier.from_ram(homes.bytes(move.chunk), to)
                else:
                    extent = chunk_group.extents[move.state_kind][move.chunk.id]
                    self._link.home_copier.from_file(extent.offset, to[: extent.nbytes])

    def _has_bytes(self, move: Move) -> bool:
        """Whether what comes to memory has bytes where it is."""
        return move.state_kind is not StateKind.GRAD or self._chunk_group.grads.comes_to_memory(
            move.chunk
        )

    def _new_extent(self, move: Move) -> Extent:
        chunk_group = self._chunk_group
        space, used = extent_sizes(
            chunk_group.layout, chunk_group.dtypes, move.state_kind.value, move.chunk
        )
        return Extent(chunk_group.file.take(space), used, move.chunk.slots)

    def abandon(self) -> None:
        """Undoes prepare(); idempotent. Raises BudgetError if others have the DEVICE's room now."""
        chunk_group = self._chunk_group
        for move, extent in self._written.items():
            self._give_back(move, extent)
        self._written.clear()
        for move in self._moves:
            chunk_group.homes[move.state_kind].abandon(move.chunk)
        self._copied.clear()
        self._seats.come_back()
        if chunk_group.pools.gathered.slots < self._before.gathered_slots:
            chunk_group.pools.fill_gathered(self._before.gathered_slots)
            chunk_group.caches[0].refit()

    def _give_back(self, move: Move, extent: Extent) -> None:
        self._chunk_group.file.give_back(extent.offset, self._space(move))

    def _space(self, move: Move) -> int:
        chunk_group = self._chunk_group
        return extent_sizes(
            chunk_group.layout, chunk_group.dtypes, move.state_kind.value, move.chunk
        )[0]

    def leave(self) -> None:
        """Gives back all memory that is not a home of `after`, or a home that stays."""
        chunk_group = self._chunk_group
        for move, extent in self._written.items():
            chunk_group.extents[move.state_kind][move.chunk.id] = extent
            chunk_group.homes[move.state_kind].give_up(move.chunk)
        for move in self._copied:
            chunk_group.homes[move.state_kind].adopt(move.chunk)
            if move.of is Tier.DISK:
                self._give_back(move, chunk_group.extents[move.state_kind].pop(move.chunk.id))
        chunk_group.pools.empty()
        if chunk_group.buckets is not None:
            chunk_group.buckets.refit(0, 0)

    def arrive(self, spare_bytes: int) -> tuple[Placement, BaseException | None]:
        """Brings what comes to RAM. Returns the placement as it is now, and what went wrong.

        What cannot be read stays in the file; the chunk group works nevertheless, if RAM suffices
        for the slots which that takes.
        """
        chunk_group, error = self._chunk_group, self._bring()
        made = self._after
        for move in self._stayed:
            tiers = list(getattr(made, move.state_kind.value))
            tiers[move.chunk.id] = Tier.DISK
            made = replace(made, **{move.state_kind.value: tuple(tiers)})  # type: ignore[arg-type]
        if error is not None:
            made = self._with_pools_for(made)
        try:
            chunk_group.pools.fill(made, spare_bytes)
            if chunk_group.buckets is not None:
                chunk_group.buckets.refit(made.bucket_slots, made.receive_slots)
        except BaseException as failure:
            error = error or failure
        if chunk_group.link is not None:
            chunk_group.link.grad_offload.limit_bytes = made.grad_offload_bytes
        for user in chunk_group.pipeline_users:
            user.use(chunk_group.pools.pipeline)
        for cache in (*chunk_group.caches, chunk_group.grad_cache):
            cache.refit()
        if chunk_group.gathered_cache is not None:
            chunk_group.gathered_cache.refit(made.gathered_slots)
        chunk_group.params.refit()
        self._seats.take(move.chunk for move in self._moves if move.state_kind is StateKind.PARAM)
        return made, error

    def _bring(self) -> BaseException | None:
        """Reads what comes from the file to RAM; returns the first error."""
        chunk_group, first_error = self._chunk_group, None
        reads: list[tuple[Move, IoOp | None]] = []
        for move in self._moves:
            if move.to is not Tier.HOST or (move.of is not Tier.DISK and move not in self._written):
                continue
            homes, extent = (
                chunk_group.homes[move.state_kind],
                chunk_group.extents[move.state_kind][move.chunk.id],
            )
            try:
                homes.take(move.chunk, Tier.HOST)
                op = None
                if self._has_bytes(move):
                    address = homes.bytes(move.chunk, second=True).data_ptr()
                    op = chunk_group.file.read(address, extent.nbytes, extent.offset)
                reads.append((move, op))
            except BaseException as error:
                homes.abandon(move.chunk)
                self._stayed.append(move)
                first_error = first_error or error
        for move, op in reads:
            try:
                if op is not None:
                    op.wait()
            except BaseException as error:
                chunk_group.homes[move.state_kind].abandon(move.chunk)
                self._stayed.append(move)
                first_error = first_error or error
            else:
                chunk_group.homes[move.state_kind].adopt(move.chunk)
                self._give_back(move, chunk_group.extents[move.state_kind].pop(move.chunk.id))
        return first_error

    def _with_pools_for(self, made: Placement) -> Placement:
        """`made` with enough RAM for whatever is on DISK now, be it from before, or on its way."""
        names = ["grad_slots", "buffers", "shard_slots", "staged_slots"]
        if self._chunk_group.link is None:
            names.append("gathered_slots")
        most = {name: max(getattr(self._before, name), getattr(made, name)) for name in names}
        if self._chunk_group.link is not None and Tier.DISK in made.param:
            longest = max(c.slots for c in self._chunk_group.layout.chunks)
            most["shard_slots"] = max(most["shard_slots"], longest)
        if Tier.DISK in made.grad:
            most["grad_slots"] = max(most["grad_slots"], made.longest_trained)
        if made.trained_param_on_disk or Tier.DISK in (*made.grad, *made.optim_state):
            most["buffers"] = max(most["buffers"], 1)
        return replace(made, **most)
