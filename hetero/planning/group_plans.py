"""What goes where, from a model and a configuration alone: no memory is taken.

Also for a model on the meta device, so that a budget can be refused before anything is built.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import (
    ALIGN_NUMEL,
    MAX_SLOT_NUMEL,
    MIN_SLOT_NUMEL,
    WHOLE,
    Chunk,
    Layout,
    ParamSpec,
    Shard,
    pack,
    search_slot_numel,
)
from hetero.config import Config
from hetero.planning.placement import (
    CONSTRUCTION_BYTES,
    Budgets,
    Placement,
    PlacementError,
    SlotBytes,
    concurrent_slots,
    place,
)
from offload.memory.sizes import round_up
from offload.memory.tiers import Tier

# What decides on a chunk group's placement: place() or something that takes and raises the same.
Choose = Callable[[Layout, Dtypes, str, Budgets, int, bool], Placement]

# A slot's four kinds of state are at most this share of host_memory: a few slots are always in
# flight.
_SLOT_SHARE_OF_HOST = 16


@dataclass(frozen=True)
class ChunkGroupPlan:
    """One chunk group: parameters of one compute dtype, which are laid out and placed together.

    `held`: of several ranks each keeps the chunk group's gradients whole until the end of backward.
    Only one chunk group, the *early* one, averages them before: if two did, a rank could wait in
    one for a rank that waits in the other.
    """

    dtypes: Dtypes
    layout: Layout
    placement: Placement
    held: bool
    min_gathered_slots: int = 1  # that a module with its ancestors may need at once


@dataclass(frozen=True)
class Arrangement:
    """The managed parameters, in the order of their specs' indices, and where they go.

    The first chunk group has the compute dtype, unless all parameters stay in fp32; a second one
    has those that do.
    """

    params: tuple[torch.nn.Parameter, ...]
    chunk_groups: tuple[ChunkGroupPlan, ...]

    @property
    def layout(self) -> Layout:
        """The first chunk group's."""
        return self.chunk_groups[0].layout

    @property
    def placement(self) -> Placement:
        """The first chunk group's."""
        return self.chunk_groups[0].placement


def arrange(
    model: torch.nn.Module,
    config: Config,
    dtypes: Dtypes,
    host_bytes: int,
    disk_bytes: int,
    optimized: set[int] | None = None,
    shard: Shard = WHOLE,
    device_bytes: int | None = None,
    choose: Choose = place,
) -> Arrangement:
    """Lays out and places the model's floating-point parameters that have elements.

    `dtypes` are optimizer.dtypes(config). `optimized` are the ids of the optimizer's parameters
    (None: all that require gradients). `shard` is what this rank has of it all; the result differs
    between ranks in that alone. `device_bytes` are those of a DEVICE that is not RAM, which
    device_memory otherwise is about. `choose` decides on each chunk group's placement.
    Raises BudgetError with the smallest budget that works, ValueError for a model without any and
    for a pattern of keep_fp32 that fits no name.
    """
    specs: list[ParamSpec] = []
    params: list[torch.nn.Parameter] = []
    group_of = groups_of(model, config.shard_strategy)
    for name, param in model.named_parameters():
        if param.is_floating_point() and param.numel():
            trains = param.requires_grad and (optimized is None or id(param) in optimized)
            group = group_of.get(id(param))
            specs.append(ParamSpec(len(specs), name, param.numel(), trains, group))
            params.append(param)
    if not specs:
        raise ValueError("the model has no floating-point parameters to manage")
    check_patterns(model, config.keep_fp32)
    kept = kept_in_fp32(model, config.keep_fp32)
    is_kept = [id(param) in kept for param in params]
    kinds = kinds_of(specs, is_kept, config, dtypes)
    budgets = Budgets(
        host_bytes,
        disk_bytes,
        config.budget(Tier.DEVICE) if device_bytes is None else None,
        device_bytes,
        keep_optim_states=config.host_memory is not None,
        reserved_host=config.reserve_bytes,
    )
    by_index = dict(enumerate(params))
    chunk_groups = plan_chunk_groups(model, kinds, by_index, config, budgets, shard, choose=choose)
    return Arrangement(tuple(params), chunk_groups)


# Which dtype a parameter has

Kind = tuple[Dtypes, list[ParamSpec]]


def check_patterns(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Raises ValueError for a pattern of keep_fp32 that fits no parameter's name."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            (nearest,) = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ValueError(
                f"keep_fp32: no parameter has a name like {pattern!r}; the nearest is {nearest!r}"
            )


def kept_in_fp32(model: torch.nn.Module, patterns: Sequence[str]) -> set[int]:
    """Ids of the parameters that stay in fp32.

    Those whose names fit a pattern, and those of modules with running statistics in fp32: torch
    refuses weights of batch normalisation in another dtype than its statistics.
    """
    kept = {
        id(param)
        for name, param in model.named_parameters(remove_duplicate=False)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    for module in model.modules():
        statistics = getattr(module, "running_mean", None)
        if isinstance(statistics, torch.Tensor) and statistics.dtype is torch.float32:
            kept |= {id(param) for param in module.parameters(recurse=False)}
    return kept


def kinds_of(
    specs: Sequence[ParamSpec], is_kept: Sequence[bool], config: Config, dtypes: Dtypes
) -> list[Kind]:
    """`specs` by their dtypes: those in the compute dtype, then those that are kept in fp32."""
    if dtypes.compute == "fp32":
        return [(dtypes, list(specs))]
    fp32 = replace(
        dtypes,
        compute="fp32",
        grad=dtypes.grad if config.grad_dtype else "fp32",
        reduce=dtypes.reduce if config.zero_stage >= 2 else None,
    )
    main = [spec for spec, kept in zip(specs, is_kept, strict=True) if not kept]
    others = [spec for spec, kept in zip(specs, is_kept, strict=True) if kept]
    return [(of, some) for of, some in ((dtypes, main), (fp32, others)) if some]


# Where it goes


def plan_chunk_groups(
    model: torch.nn.Module,
    kinds: Sequence[Kind],
    params: Mapping[int, torch.nn.Parameter],
    config: Config,
    budgets: Budgets,
    shard: Shard,
    first: int = 0,
    early: int | None = 0,
    choose: Choose = place,
) -> tuple[ChunkGroupPlan, ...]:
    """Chunk groups for `kinds`, numbered from `first` on; `params` by their specs' indices.

    All but number `early` are held.

    The last kind, which usually is small, is placed first; the first gets what is left. If that is
    not enough, the others make do with the least that they can.
    Raises BudgetError with the smallest budget that works.
    """
    for thrifty in (False, True):
        taken = budgets
        plans: list[ChunkGroupPlan] = []
        try:
            for offset in reversed(range(len(kinds))):
                dtypes, specs = kinds[offset]
                chunk_numel = config.chunk_numel
                if chunk_numel is not None and first + offset:
                    # Not much more than it has: it may be tiny.
                    numel = sum(round_up(spec.numel, ALIGN_NUMEL) for spec in specs)
                    chunk_numel = min(chunk_numel, numel)
                maker = _ChunkGroupPlanner(
                    model,
                    params,
                    specs,
                    dtypes,
                    config,
                    chunk_numel,
                    shard,
                    number=first + offset,
                    held=first + offset != early,
                    choose=choose,
                )
                waiting = 0
                if not budgets.disk and budgets.under_construction:
                    numel = sum(spec.numel for _, some in kinds[:offset] for spec in some)
                    waiting = numel * CONSTRUCTION_BYTES // shard.ranks
                taken = replace(taken, waiting=waiting)
                make = maker.smallest if thrifty and offset else maker.fastest
                plans.append(make(taken))
                placement = plans[-1].placement
                slot = SlotBytes.of(plans[-1].layout, dtypes)
                taken = replace(
                    taken,
                    taken_host=taken.taken_host + placement.host_bytes,
                    taken_disk=taken.taken_disk + placement.disk_bytes,
                    taken_gathered=taken.taken_gathered + placement.gathered_slots * slot.gathered,
                    taken_device=taken.taken_device + placement.device_bytes,
                )
        except PlacementError:
            if thrifty or len(kinds) == 1:
                raise
        else:
            return tuple(reversed(plans))
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class _ChunkGroupPlanner:
    model: torch.nn.Module
    params: Mapping[int, torch.nn.Parameter]
    specs: Sequence[ParamSpec]
    dtypes: Dtypes
    config: Config
    chunk_numel: int | None
    shard: Shard
    number: int
    held: bool
    choose: Choose

    def fastest(self, budgets: Budgets) -> ChunkGroupPlan:
        """The fastest that fits."""
        refusals = []
        for layout in self._layouts(budgets.host):
            try:
                return self._place(layout, budgets)
            except PlacementError as refusal:
                refusals.append(refusal)
        device = budgets.device or 0
        raise min(
            refusals, key=lambda r: (max(r.smallest_device_bytes, device), r.smallest_host_bytes)
        )

    def smallest(self, budgets: Budgets) -> ChunkGroupPlan:
        """The one that takes the least RAM, whether or not there is as much."""
        found: tuple[int, Layout] | None = None
        for layout in self._layouts(budgets.host):
            try:
                return self._place(layout, replace(budgets, host=0))
            except PlacementError as refusal:
                if found is None or refusal.smallest_host_bytes < found[0]:
                    found = refusal.smallest_host_bytes, layout
        assert found is not None
        host_bytes, layout = found
        return self._place(layout, replace(budgets, host=host_bytes))

    def _place(self, layout: Layout, budgets: Budgets) -> ChunkGroupPlan:
        chunk_of = {id(self.params[s.param.index]): c for c in layout.chunks for s in c.slices}
        held_together = concurrent_slots(_held_together(self.model, chunk_of))
        policy = self.config.placement_policy
        placement = self.choose(layout, self.dtypes, policy, budgets, held_together, self.held)
        return ChunkGroupPlan(self.dtypes, layout, placement, self.held, held_together)

    def _layouts(self, host_bytes: int) -> Iterator[Layout]:
        """Layouts to try: the one that suits the budget, then with ever smaller slots."""
        if self.chunk_numel is not None:
            # Divisible by the ranks, the rest is padding.
            slot_numel = round_up(self.chunk_numel, self.shard.slot_multiple)
            yield pack(self.specs, slot_numel, self.shard, self.number)
            return
        dtypes = self.dtypes
        slot_bytes = dtypes.param_bytes + dtypes.grad_bytes + dtypes.optim_state_bytes
        suits = min(MAX_SLOT_NUMEL, host_bytes // _SLOT_SHARE_OF_HOST // slot_bytes)
        smaller = [MAX_SLOT_NUMEL >> shift for shift in range(MAX_SLOT_NUMEL.bit_length())]
        limits = [suits, *(limit for limit in smaller if limit >= MIN_SLOT_NUMEL)]
        tried = set()
        for limit in limits:
            slot_numel = search_slot_numel(self.specs, limit, self.shard)
            if slot_numel not in tried:
                tried.add(slot_numel)
                yield pack(self.specs, slot_numel, self.shard, self.number)


def groups_of(model: torch.nn.Module, strategy: str) -> dict[int, int]:
    """The group of each parameter, by its id, that the strategy wants to have its own chunk."""
    if strategy == "chunk":
        return {}
    if strategy == "tensor":
        return {id(param): index for index, param in enumerate(model.parameters())}
    group_of: dict[int, int] = {}
    for index, module in enumerate(model.modules()):
        for param in module.parameters(recurse=False):
            group_of.setdefault(id(param), index)
    return group_of


def _held_together(
    model: torch.nn.Module, chunk_of: Mapping[int, Chunk]
) -> list[tuple[Chunk, ...]]:
    """For each module the chunks that are held while it runs: its own and its ancestors'."""
    found: list[tuple[Chunk, ...]] = []

    def visit(module: torch.nn.Module, held: dict[int, Chunk]) -> None:
        own = [chunk_of[id(p)] for p in module._parameters.values() if id(p) in chunk_of]
        held = {**held, **{c.id: c for c in own}}
        if own:
            found.append(tuple(held.values()))
        for child in module.children():
            visit(child, held)

    visit(model, {})
    return found
