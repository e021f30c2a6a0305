"""Moving chunks' homes between RAM and the file, between steps; bits do not change.

A migration has three parts, so that several banks, and ranks, can go through them together and the
budgets hold in between:

prepare    what leaves RAM is written to the file. Until all of it is there nothing has changed, and
           abandon() makes it as it was.
leave      memory is given back: of homes that left, and all slots.
arrive     what comes to RAM is read; slots get their new sizes.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from hetero.bank_file import BankFile
from hetero.buckets import Buckets
from hetero.dtypes import Dtypes
from hetero.extents import extent_sizes
from hetero.grads import Grads
from hetero.homes import Homes
from hetero.layout import Chunk, Layout
from hetero.managed import ManagedParam
from hetero.params import Params
from hetero.placement import Placement, SlotBytes
from hetero.pools import Pools
from hetero.records import Records
from offload._native import IoOp, StepPipeline
from offload.backing import Extent
from offload.cache import SlotCache
from offload.errors import HeteroError
from offload.tiers import Tier


class Payload(enum.Enum):
    """What of a chunk moves by itself; the values are Placement's names."""

    PARAM = "param"
    GRAD = "grad"
    RECORD = "record"


class InUseError(HeteroError):
    """Something that would have to move is in use; it may be free later."""


@dataclass(frozen=True)
class Move:
    """One payload of one chunk leaves RAM, or comes there."""

    payload: Payload
    chunk: Chunk
    to: Tier


class Clearable(Protocol):
    """A cache of copies."""

    def clear(self) -> None: ...
    def refit(self) -> None: ...


class PipelineUser(Protocol):
    """Who needs to know of a new pipeline."""

    def use(self, pipeline: StepPipeline) -> None: ...


@dataclass(frozen=True)
class Movable:
    """The parts of a bank that migrations change, as its builder has made them."""

    layout: Layout
    dtypes: Dtypes
    members: Sequence[ManagedParam]
    homes: Mapping[Payload, Homes]
    extents: Mapping[Payload, dict[int, Extent]]  # of what is on DISK
    file: BankFile
    pools: Pools
    params: Params
    grads: Grads
    records: Records
    caches: Sequence[Clearable]  # of parameters, the nearest to compute first
    grad_cache: Clearable
    gathered_cache: SlotCache | None  # the one whose slots for every day the placement counts
    pipeline_users: Sequence[PipelineUser]
    buckets: Buckets | None


def moves_between(layout: Layout, before: Placement, after: Placement) -> list[Move]:
    """What moves; homes on DEVICE never do."""
    moves = []
    for payload in Payload:
        old, new = getattr(before, payload.value), getattr(after, payload.value)
        for chunk in layout.chunks:
            if old[chunk.id] is not new[chunk.id]:
                assert {old[chunk.id], new[chunk.id]} == {Tier.HOST, Tier.DISK}
                moves.append(Move(payload, chunk, new[chunk.id]))
    return moves


class Migration:
    """One bank's way from a placement to another."""

    def __init__(self, bank: Movable, before: Placement, after: Placement) -> None:
        self._bank = bank
        self._before, self._after = before, after
        moves = moves_between(bank.layout, before, after)
        self._out = [move for move in moves if move.to is Tier.DISK]
        self._back = [move for move in moves if move.to is Tier.HOST]
        self._written: dict[Move, Extent] = {}
        self._stayed: list[Move] = []  # what should have come to RAM and could not be read
        self._slot = SlotBytes.of(bank.layout, bank.dtypes)
        self._unseated: list[Move] = []  # whose parameters were made absent to see who else looks
        # Not those that another bank has by now: they do not point here any more.
        self._members: dict[int, list[ManagedParam]] = {c.id: [] for c in bank.layout.chunks}
        for managed in bank.members:
            if not managed.replaced:
                self._members[managed.chunk.id].append(managed)

    @property
    def moved_bytes(self) -> int:
        """Of homes, both ways."""
        return sum(
            move.chunk.slots * getattr(self._slot, move.payload.value)
            for move in (*self._out, *self._back)
        )

    def prepare(self) -> None:
        """Writes what leaves RAM. Between steps, outside of gathered(), with no graph alive.

        Raises InUseError for what is in use, BudgetError or StoreError for want of file space,
        NativeIoError; with nothing changed.
        """
        bank = self._bank
        self._require_idle()
        for move in (*self._out, *self._back):
            if move.payload is Payload.PARAM:
                self._require_in_place(move.chunk)
        with bank.records.lock:
            bank.pools.pipeline.wait_updated()
            bank.pools.pipeline.forget()
            for cache in bank.caches:
                cache.clear()
            bank.grads.flush()
            ops: list[IoOp] = []
            try:
                for move in self._out:
                    self._let_go(move)
                bank.file.make_room(sum(self._space(move) for move in self._out))
                for move in self._out:
                    ops += self._write(move)
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

    def _require_in_place(self, chunk: Chunk) -> None:
        for m in self._members[chunk.id]:
            if m.changed_unnoticed or not self._bank.params.is_in_place(m):
                raise InUseError(
                    f"{m.name} cannot move between RAM and NVMe: it was moved, or changed in "
                    f"place, outside of hetero.gathered(..., modifier_rank=0)"
                )

    def _let_go(self, move: Move) -> None:
        """Raises InUseError if somebody views the home that is to move."""
        chunk, bank = move.chunk, self._bank
        resident = move.payload is Payload.PARAM and bank.params.is_resident(chunk)
        members = self._members[chunk.id]
        if resident:
            self._unseated.append(move)
            for m in members:
                m.param.data = m.absent
        if move.payload is Payload.PARAM:
            bank.params.drop_copies(chunk)  # a device may be copying from it
        saved = resident and any(map(_in_a_graph, members))
        if saved or not bank.homes[move.payload].let_go(chunk):
            raise InUseError(
                f"the {move.payload.name} of {chunk.name} cannot move to NVMe: a tensor of yours, "
                f"or of a graph whose backward was not made, still views it"
            )

    def _write(self, move: Move) -> list[IoOp]:
        """Starts writing what moves to the file, unless there is nothing worth keeping."""
        bank, chunk = self._bank, move.chunk
        space, used = extent_sizes(bank.layout, bank.dtypes, move.payload.value, chunk)
        extent = Extent(bank.file.take(space), used, chunk.slots)
        self._written[move] = extent
        if move.payload is Payload.GRAD and not bank.grads.leaves_ram(chunk):
            return []
        address = bank.homes[move.payload].address(chunk, 0)
        return [bank.file.write(address, extent.nbytes, extent.offset)]

    def abandon(self) -> None:
        """Undoes prepare(); idempotent."""
        for move, extent in self._written.items():
            self._give_back(move, extent)
        self._written.clear()
        self._seat(self._unseated, moved=False)
        self._unseated.clear()

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
        if error is not None:
            made = _with_pools_of_both(self._before, made)
            for move in self._stayed:
                tiers = list(getattr(made, move.payload.value))
                tiers[move.chunk.id] = Tier.DISK
                made = replace(made, **{move.payload.value: tuple(tiers)})  # type: ignore[arg-type]
        try:
            bank.pools.fill(made, spare_bytes)
            if bank.buckets is not None:
                bank.buckets.refit(made.bucket_slots, made.receive_slots)
        except BaseException as failure:
            error = error or failure
        for user in bank.pipeline_users:
            user.use(bank.pools.pipeline)
        for cache in (*bank.caches, bank.grad_cache):
            cache.refit()
        if bank.gathered_cache is not None:
            bank.gathered_cache.refit(made.gathered_slots)
        bank.params.refit()
        self._seat([*self._out, *self._back], moved=True)
        return made, error

    def _bring(self) -> BaseException | None:
        """Reads what comes to RAM; returns the first error."""
        bank, first_error = self._bank, None
        reads: list[tuple[Move, IoOp | None]] = []
        for move in self._back:
            homes, extent = bank.homes[move.payload], bank.extents[move.payload][move.chunk.id]
            try:
                homes.take(move.chunk)
                op = None
                if move.payload is not Payload.GRAD or bank.grads.comes_to_ram(move.chunk):
                    address = homes.address(move.chunk, 0)
                    op = bank.file.read(address, extent.nbytes, extent.offset)
                reads.append((move, op))
            except BaseException as error:
                if move.chunk in homes:
                    homes.give_up(move.chunk)
                self._stayed.append(move)
                first_error = first_error or error
        for move, op in reads:
            try:
                if op is not None:
                    op.wait()
            except BaseException as error:
                bank.homes[move.payload].give_up(move.chunk)
                self._stayed.append(move)
                first_error = first_error or error
            else:
                self._give_back(move, bank.extents[move.payload].pop(move.chunk.id))
        return first_error

    def _seat(self, moves: Sequence[Move], moved: bool) -> None:
        """Parameters point to where they are used now."""
        params = self._bank.params
        for chunk in {m.chunk.id: m.chunk for m in moves if m.payload is Payload.PARAM}.values():
            for managed in self._members[chunk.id]:
                resident = params.is_resident(chunk)
                managed.param.data = (
                    managed.part_of(params.flat(chunk)) if resident else managed.absent
                )
                if moved:
                    # As after a change: a backward that finds the parameter itself, not a view,
                    # among what was saved then fails, instead of reading what is not there.
                    torch.autograd.graph.increment_version(managed.param)
                    managed.note_change()


def _in_a_graph(managed: ManagedParam) -> bool:
    """Whether autograd has saved the parameter itself: nobody can see that in what it views.

    Besides the graph, Python refers to it, and the node that accumulates its gradient, which the
    engine keeps. (Where torch does not count, such a backward fails by the version instead.)
    """
    count = getattr(managed.param, "_use_count", None)
    return count is not None and count() > (2 if managed.chunk.trainable else 1)


def _with_pools_of_both(before: Placement, after: Placement) -> Placement:
    """Enough for whatever either has on DISK."""
    names = ("gathered_slots", "grad_slots", "buffers", "shard_slots", "staged_slots")
    return replace(
        after, **{name: max(getattr(before, name), getattr(after, name)) for name in names}
    )
