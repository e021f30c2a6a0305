"""What goes where, from a model and a configuration alone: no memory is taken.

Also for a model on the meta device, so that a budget can be refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hetero.config import Config
from hetero.dtypes import Dtypes
from hetero.layout import (
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
from hetero.placement import Budgets, Placement, PlacementError, concurrent_slots, place
from offload.sizes import round_up
from offload.tiers import Tier

# A slot's four payloads are at most this share of host_memory: a few slots are always in flight.
_SLOT_SHARE_OF_HOST = 16


@dataclass(frozen=True)
class Arrangement:
    """The managed parameters, in the order of their specs' indices, and where they go."""

    params: tuple[torch.nn.Parameter, ...]
    layout: Layout
    placement: Placement


def arrange(
    model: torch.nn.Module,
    config: Config,
    dtypes: Dtypes,
    host_bytes: int,
    disk_bytes: int,
    optimized: set[int] | None = None,
    shard: Shard = WHOLE,
) -> Arrangement:
    """Lays out and places the model's floating-point parameters that have elements.

    `dtypes` are optimizer.dtypes(config). `optimized` are the ids of the optimizer's parameters
    (None: all that require gradients). `shard` is what this rank has of it all; the result differs
    between ranks in that alone.
    Raises BudgetError with the smallest budget that works, ValueError for a model without any.
    """
    specs: list[ParamSpec] = []
    params: list[torch.nn.Parameter] = []
    group_of = _groups(model, config.shard_strategy)
    for name, param in model.named_parameters():
        if param.is_floating_point() and param.numel():
            trains = param.requires_grad and (optimized is None or id(param) in optimized)
            group = group_of.get(id(param))
            specs.append(ParamSpec(len(specs), name, param.numel(), trains, group))
            params.append(param)
    if not specs:
        raise ValueError("the model has no floating-point parameters to manage")
    budgets = Budgets(
        host_bytes,
        disk_bytes,
        config.budget(Tier.DEVICE),
        keep_records=config.host_memory is not None,
    )
    refusals = []
    for layout in _layouts(specs, config, dtypes, host_bytes, shard):
        chunk_of = {id(params[s.param.index]): c for c in layout.chunks for s in c.slices}
        held_together = concurrent_slots(_held_together(model, chunk_of))
        try:
            placement = place(layout, dtypes, config.placement_policy, budgets, held_together)
        except PlacementError as refusal:
            refusals.append(refusal)
        else:
            return Arrangement(tuple(params), layout, placement)
    raise min(refusals, key=lambda refusal: refusal.smallest_host_bytes)


def _groups(model: torch.nn.Module, strategy: str) -> dict[int, int]:
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


def _layouts(
    specs: Sequence[ParamSpec], config: Config, dtypes: Dtypes, host_bytes: int, shard: Shard
) -> Iterator[Layout]:
    """Layouts to try: the one that suits the budget, then with ever smaller slots."""
    if config.chunk_numel is not None:
        # Divisible by the ranks, the rest is padding.
        yield pack(specs, round_up(config.chunk_numel, shard.slot_multiple), shard)
        return
    slot_bytes = dtypes.param_bytes + dtypes.grad_bytes + dtypes.record_bytes
    suits = min(MAX_SLOT_NUMEL, host_bytes // _SLOT_SHARE_OF_HOST // slot_bytes)
    smaller = [MAX_SLOT_NUMEL >> shift for shift in range(MAX_SLOT_NUMEL.bit_length())]
    limits = [suits, *(limit for limit in smaller if limit >= MIN_SLOT_NUMEL)]
    tried = set()
    for limit in limits:
        slot_numel = search_slot_numel(specs, limit, shard)
        if slot_numel not in tried:
            tried.add(slot_numel)
            yield pack(specs, slot_numel, shard)


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
