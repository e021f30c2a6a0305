"""When an engine's budgets change, and homes with them: by the user's wish, or to keep a limit.

Of several ranks all do so together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.chunk_group import ChunkGroup, Shared
from hetero.planning.group_plans import ChunkGroupPlan, file_checksums, place_groups
from hetero.planning.placement import Budgets, GroupSpec, Placement, PlacementError
from hetero.planning.refusal import SAID, cannot_become, process_passed, too_much
from hetero.runtime.relocation.relocate import Change, InUseError, Relocation, same
from offload.device.backend import Backend
from offload.errors import BudgetError, HeteroError, PeerError
from offload.memory.ledger import Ledger
from offload.memory.process_memory import ResidentMemory, margin_bytes, trim_heap
from offload.memory.sizes import format_bytes, parse_bytes
from offload.memory.tiers import Account, Tier

_DEVICE_MARGIN = 64  # one part in so many of a device's limit stays free
_TOLD_AGAIN = 64  # the user is told again when a limit is passed by one part in so many more
_RESERVE = 32  # one part in so many of a device: for what its allocator cannot use, and for others


class BesideMemory:
    """Bytes that are not model state: activations, temporaries, libraries, and what the allocator
    keeps.

    In RAM it is RSS without what the ledger has charged, pages that were never touched included;
    so until all memory was used once it is too little. An emulated DEVICE is RAM, and what computes
    there uses beside it is in RAM's figure. Reading it takes some 5 us.
    """

    def __init__(self, ledger: Ledger, backend: Backend) -> None:
        self._resident = ResidentMemory()
        self._peak = self._resident.peak()
        self._process = os.getpid()
        self._ledger = ledger
        self._backend = backend
        self._take_managed_peak()  # what was there before is no step's

    def __call__(self) -> tuple[int, int]:
        """(in RAM, on a DEVICE that is not RAM) now."""
        host = self._resident.nbytes() - self.managed_bytes(Tier.HOST)
        return max(0, host), self.device_bytes()

    def new_peak(self) -> tuple[int, int]:
        """The most bytes that the process ever held, if that is more than when it was asked last,
        and how many of them at least were not model state; else (0, 0).

        The kernel counts it, so what a step had for a moment is in it. All that was charged at most
        since then may have been there at that moment.
        """
        peak, before = self._resident.peak(), self._peak
        managed_bytes = self._take_managed_peak()
        self._peak = max(peak, before)
        return (peak, max(0, peak - managed_bytes)) if peak > before else (0, 0)

    def _take_managed_peak(self) -> int:
        host = self._ledger.take_peak(Tier.HOST)
        return host + (self._ledger.take_peak(Tier.DEVICE) if self._device_is_ram else 0)

    def device_bytes(self) -> int:
        """The most bytes beside model state on a DEVICE that is not RAM since the last reset()."""
        return self._backend.beside_bytes()

    def reset(self) -> None:
        """Restarts the peak measurement that device_bytes() reports."""
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

    def close(self) -> None:
        """Closes the file that RSS is read from."""
        if os.getpid() == self._process:
            self._resident.close()


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
        """A placement for each chunk group. Raises PlacementError if nothing fits."""
        groups = [partial(self._specs, chunk_group) for chunk_group in self._chunk_groups]
        return [plan.placement for plan in place_groups(groups, budgets)]

    def _specs(self, chunk_group: ChunkGroup, budgets: Budgets) -> list[GroupSpec]:
        """The one spec with which the chunk group can be placed within `budgets`."""
        spec = GroupSpec(
            chunk_group.layout,
            chunk_group.dtypes,
            self._shared.config.placement_policy,
            budgets,
            chunk_group.plan.spec.min_gathered_slots,
            reduce_at_end=chunk_group.reduce_at_end,
            overlaps_updates=self._shared.config.debugging.overlap.repeats,
            checksums=file_checksums(
                self._shared.config, chunk_group.memory.scratch_space.checksum_bytes
            ),
        )
        return [spec]

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
