"""Moving chunks' homes between DEVICE, RAM and the file, between steps; bits do not change.

A migration has three parts, so that several banks, and ranks, can go through them together and the
budgets hold in between:

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

from hetero.chunk_groups.movable import InUseError, Link, Movable, Move, Payload, moves_between
from hetero.planning.placement import Placement, SlotBytes
from hetero.runtime.relocation.seats import Seats
from hetero.state.file_layout import extent_sizes
from offload._native import IoOp
from offload.disk.backing import Extent
from offload.errors import BudgetError
from offload.memory.tiers import Tier


class Migration:
    """One bank's way from a placement to another."""

    def __init__(self, bank: Movable, before: Placement, after: Placement) -> None:
        self._bank = bank
        self._before, self._after = before, after
        self._moves = moves_between(bank.layout, before, after)
        self._written: dict[Move, Extent] = {}
        self._copied: list[Move] = []  # to second homes
        self._stayed: list[Move] = []  # what should have come to RAM and could not be read
        self._slot = SlotBytes.of(bank.layout, bank.dtypes)
        self._seats = Seats(bank)

    @property
    def moved_bytes(self) -> Counter[tuple[Tier, Tier]]:
        """Of homes, by where they were and where they are."""
        found: Counter[tuple[Tier, Tier]] = Counter()
        for move in self._moves:
            nbytes = move.chunk.slots * getattr(self._slot, move.payload.value)
            found[move.of, move.to] += nbytes
        return found

    def prepare(self) -> None:
        """Brings what leaves where it goes. Between steps, outside of gathered(), with no graph
        alive.

        Raises InUseError for what is in use, BudgetError or StoreError for want of file space or of
        room to move in, an OSError if a transfer failed; with nothing changed.
        """
        bank = self._bank
        self._require_idle()
        for move in self._moves:
            if move.payload is Payload.PARAM:
                self._seats.require_in_place(move.chunk)
        with bank.records.lock:
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
        bank = self._bank
        why = None
        if bank.params.in_use:
            why = "parameters are gathered"
        elif bank.buckets is not None and not bank.buckets.is_idle:
            why = "gradients wait to be averaged over the ranks"
        if why is not None:
            raise InUseError(
                f"homes cannot move now: {why}; call it between steps, outside of "
                f"hetero.gathered() and hetero.no_sync(), when no tensor of a graph is left"
            )

    def _quiesce(self) -> None:
        """Nothing is under way any more, and homes alone have the latest."""
        bank = self._bank
        bank.pools.pipeline.wait_updated()
        bank.pools.pipeline.forget()
        for cache in bank.caches:
            cache.clear()
        bank.grads.flush()
        if bank.buckets is not None:
            bank.buckets.let_go()
        if bank.link is not None:
            bank.link.backend.settle()

    @property
    def _link(self) -> Link:
        assert self._bank.link is not None
        return self._bank.link

    def _let_go(self, move: Move) -> None:
        """Raises InUseError if somebody views the home that is to move."""
        chunk, bank = move.chunk, self._bank
        free = True
        if move.payload is Payload.PARAM:
            free = self._seats.leave(chunk)
            bank.params.drop_copies(chunk)  # a device may be copying from it
        if not (bank.homes[move.payload].let_go(chunk) and free):
            raise InUseError(
                f"the {move.payload.name} of {chunk.name} cannot move from {move.of.name} to "
                f"{move.to.name}: a tensor of yours, or of a graph whose backward was not made, "
                f"still views it"
            )

    def _take_ram(self) -> None:
        """Second homes for what comes from DEVICE to RAM; what has no room goes to the file."""
        for move in self._moves:
            if (move.of, move.to) == (Tier.DEVICE, Tier.HOST):
                try:
                    self._bank.homes[move.payload].take(move.chunk, Tier.HOST)
                except BudgetError as error:
                    if self._bank.file.is_possible:
                        continue
                    raise BudgetError(
                        f"while homes move, the {move.payload.name} of {move.chunk.name} has no "
                        f"room in RAM beside what is there, and there is no nvme_path: {error}"
                    ) from None
                self._copied.append(move)

    def _write_out(self, ops: list[IoOp]) -> None:
        """Writes what leaves memory, or starts to: `ops`."""
        bank, copied = self._bank, set(self._copied)
        out = [m for m in self._moves if m.of is not Tier.DISK and m.to is not Tier.DEVICE]
        out = [move for move in out if move not in copied]
        bank.file.make_room(sum(map(self._space, out)))
        for move in out:
            extent = self._written[move] = self._new_extent(move)
            if move.payload is Payload.GRAD and not bank.grads.leaves_memory(move.chunk):
                continue  # there is nothing worth keeping
            home = bank.homes[move.payload].bytes(move.chunk)[: extent.nbytes]
            if move.of is Tier.HOST:
                ops.append(bank.file.write(home.data_ptr(), extent.nbytes, extent.offset))
            else:
                self._link.ferry.to_file(home, extent.offset)

    def _copy_to_ram(self) -> None:
        """What comes from DEVICE to second homes in RAM."""
        for move in self._copied:
            home = self._bank.homes[move.payload]
            if self._has_bytes(move):
                to = home.bytes(move.chunk, second=True)
                self._link.ferry.to_ram(home.bytes(move.chunk), to)

    def _copy_to_device(self) -> None:
        """What comes to DEVICE, to second homes there, for which slots make room."""
        bank = self._bank
        moves = [move for move in self._moves if move.to is Tier.DEVICE]
        if not moves:
            return
        if self._link.updater is not None:
            self._link.updater.prepare()
        bank.pools.fill_gathered(0)
        for move in moves:
            bank.homes[move.payload].take(move.chunk, Tier.DEVICE)
            self._copied.append(move)
        for move in moves:
            if self._has_bytes(move):
                homes = bank.homes[move.payload]
                to = homes.bytes(move.chunk, second=True)
                if move.of is Tier.HOST:
                    self._link.ferry.from_ram(homes.bytes(move.chunk), to)
                else:
                    extent = bank.extents[move.payload][move.chunk.id]
                    self._link.ferry.from_file(extent.offset, to[: extent.nbytes])

    def _has_bytes(self, move: Move) -> bool:
        """Whether what comes to memory has bytes where it is."""
        return move.payload is not Payload.GRAD or self._bank.grads.comes_to_memory(move.chunk)

    def _new_extent(self, move: Move) -> Extent:
        bank = self._bank
        space, used = extent_sizes(bank.layout, bank.dtypes, move.payload.value, move.chunk)
        return Extent(bank.file.take(space), used, move.chunk.slots)

    def abandon(self) -> None:
        """Undoes prepare(); idempotent. Raises BudgetError if others have the DEVICE's room now."""
        bank = self._bank
        for move, extent in self._written.items():
            self._give_back(move, extent)
        self._written.clear()
        for move in self._moves:
            bank.homes[move.payload].abandon(move.chunk)
        self._copied.clear()
        self._seats.come_back()
        if bank.pools.gathered.slots < self._before.gathered_slots:
            bank.pools.fill_gathered(self._before.gathered_slots)
            bank.caches[0].refit()

    def _give_back(self, move: Move, extent: Extent) -> None:
        self._bank.file.give_back(extent.offset, self._space(move))

    def _space(self, move: Move) -> int:
        bank = self._bank
        return extent_sizes(bank.layout, bank.dtypes, move.payload.value, move.chunk)[0]

    def leave(self) -> None:
        """Gives back all memory that is not a home of `after`, or a home that stays."""
        bank = self._bank
        for move, extent in self._written.items():
            bank.extents[move.payload][move.chunk.id] = extent
            bank.homes[move.payload].give_up(move.chunk)
        for move in self._copied:
            bank.homes[move.payload].adopt(move.chunk)
            if move.of is Tier.DISK:
                self._give_back(move, bank.extents[move.payload].pop(move.chunk.id))
        bank.pools.empty()
        if bank.buckets is not None:
            bank.buckets.refit(0, 0)

    def arrive(self, spare_bytes: int) -> tuple[Placement, BaseException | None]:
        """Brings what comes to RAM. Returns the placement as it is now, and what went wrong.

        What cannot be read stays in the file; the bank works nevertheless, if RAM suffices for the
        slots which that takes.
        """
        bank, error = self._bank, self._bring()
        made = self._after
        for move in self._stayed:
            tiers = list(getattr(made, move.payload.value))
            tiers[move.chunk.id] = Tier.DISK
            made = replace(made, **{move.payload.value: tuple(tiers)})  # type: ignore[arg-type]
        if error is not None:
            made = self._with_pools_for(made)
        try:
            bank.pools.fill(made, spare_bytes)
            if bank.buckets is not None:
                bank.buckets.refit(made.bucket_slots, made.receive_slots)
        except BaseException as failure:
            error = error or failure
        if bank.link is not None:
            bank.link.drain.limit_bytes = made.drain_bytes
        for user in bank.pipeline_users:
            user.use(bank.pools.pipeline)
        for cache in (*bank.caches, bank.grad_cache):
            cache.refit()
        if bank.gathered_cache is not None:
            bank.gathered_cache.refit(made.gathered_slots)
        bank.params.refit()
        self._seats.take(move.chunk for move in self._moves if move.payload is Payload.PARAM)
        return made, error

    def _bring(self) -> BaseException | None:
        """Reads what comes from the file to RAM; returns the first error."""
        bank, first_error = self._bank, None
        reads: list[tuple[Move, IoOp | None]] = []
        for move in self._moves:
            if move.to is not Tier.HOST or (move.of is not Tier.DISK and move not in self._written):
                continue
            homes, extent = bank.homes[move.payload], bank.extents[move.payload][move.chunk.id]
            try:
                homes.take(move.chunk, Tier.HOST)
                op = None
                if self._has_bytes(move):
                    address = homes.bytes(move.chunk, second=True).data_ptr()
                    op = bank.file.read(address, extent.nbytes, extent.offset)
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
                bank.homes[move.payload].abandon(move.chunk)
                self._stayed.append(move)
                first_error = first_error or error
            else:
                bank.homes[move.payload].adopt(move.chunk)
                self._give_back(move, bank.extents[move.payload].pop(move.chunk.id))
        return first_error

    def _with_pools_for(self, made: Placement) -> Placement:
        """`made` with enough RAM for whatever is on DISK now, be it from before, or on its way."""
        names = ["grad_slots", "buffers", "shard_slots", "staged_slots"]
        if self._bank.link is None:
            names.append("gathered_slots")
        most = {name: max(getattr(self._before, name), getattr(made, name)) for name in names}
        if self._bank.link is not None and Tier.DISK in made.param:
            longest = max(c.slots for c in self._bank.layout.chunks)
            most["shard_slots"] = max(most["shard_slots"], longest)
        if Tier.DISK in made.grad:
            most["grad_slots"] = max(most["grad_slots"], made.longest_trained)
        if made.trained_param_on_disk or Tier.DISK in (*made.grad, *made.record):
            most["buffers"] = max(most["buffers"], 1)
        return replace(made, **most)
