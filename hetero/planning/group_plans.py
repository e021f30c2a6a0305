"""What goes where, from a model and a configuration alone: no memory is taken.

Also for a model on the meta device, so that a budget can be refused before anything is built.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

import torch

from hetero.chunks.dtypes import Dtypes, is_manageable, unmanaged_bytes
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
from hetero.planning.candidates import place
from hetero.planning.placement import (
    Budgets,
    FileChecksums,
    GroupSpec,
    Placement,
    PlacementError,
    concurrent_slots,
    waiting_bytes,
)
from hetero.ranks.process_groups import ProcessGroups
from offload.memory.sizes import round_up
from offload.memory.tiers import Tier

# A slot's four kinds of state are at most this share of host_memory: a few slots are always in
# flight.
_SLOT_SHARE_OF_HOST = 16

_LIKELY_LAYERS = 4  # of a model of which only the first parameters are known

# The specs of a chunk group that are worth a try within the given budgets, best first.
SpecsWithin = Callable[[Budgets], Iterable[GroupSpec]]


@dataclass(frozen=True)
class ChunkGroupPlan:
    """One chunk group: parameters of one compute dtype, which are laid out and placed together.

    Of several ranks only one chunk group averages gradients during backward; the others keep them
    whole until its end (`reduce_at_end`), in stage 1 all do. If two did not, a rank could wait in
    one for a rank that waits in the other.
    """

    spec: GroupSpec
    placement: Placement

    @property
    def layout(self) -> Layout:
        """How its parameters are packed into chunks."""
        return self.spec.layout

    @property
    def dtypes(self) -> Dtypes:
        """Of its parameters, gradients and optimizer states."""
        return self.spec.dtypes


@dataclass(frozen=True)
class Arrangement:
    """The managed parameters, in the order of their specs' indices, and where they go.

    The first chunk group has the compute dtype, unless all parameters stay in fp32; a second one
    has those that do.
    """

    params: tuple[torch.nn.Parameter, ...]
    chunk_groups: tuple[ChunkGroupPlan, ...]
    activation_bytes: tuple[int, int]  # of RAM, and of a DEVICE that is not RAM


def arrange(
    model: torch.nn.Module,
    config: Config,
    dtypes: Dtypes,
    host_bytes: int,
    disk_bytes: int,
    optimized: Mapping[int, Dtypes] | None = None,
    shard: Shard = WHOLE,
    device_bytes: int | None = None,
    policy: str | None = None,
    stays: Collection[str] = (),
) -> Arrangement:
    """Lays out and places the model's floating-point parameters that have elements.

    Args:
        model: may be on the meta device.
        config: the options.
        dtypes: optimizer.dtypes(config), also of parameters that no optimizer has.
        host_bytes: the budget of RAM.
        disk_bytes: the budget of file space; 0 without a directory.
        optimized: by the ids of parameters that an optimizer has, its dtypes; None: one has all
            that require gradients.
        shard: what this rank has of it all; the result differs between ranks in that alone.
        device_bytes: the budget of a DEVICE that is not RAM, which device_memory otherwise is
            about; None: DEVICE is RAM.
        policy: in the place of the configuration's placement_policy.
        stays: names of parameters that stay in RAM until their chunks are made.

    Raises:
        PlacementError: nothing fits; it has the smallest budgets that work.
        ValueError: the model has no such parameters, or a pattern of keep_fp32 fits no name.
        HeteroError: a parameter is of a dtype that cannot be managed.
    """
    specs: list[ParamSpec] = []
    params: list[torch.nn.Parameter] = []
    group_of = groups_of(model, config.debugging.shard_strategy)
    for name, param in model.named_parameters():
        if is_manageable(param, name) and param.numel():
            trains = param.requires_grad and (optimized is None or id(param) in optimized)
            group = group_of.get(id(param))
            specs.append(ParamSpec(len(specs), name, param.numel(), trains, group, name in stays))
            params.append(param)
    if not specs:
        raise ValueError("the model has no floating-point parameters to manage")
    check_patterns(model, config.keep_fp32)
    kept = kept_in_fp32(model, config.keep_fp32)
    is_kept = [id(param) in kept for param in params]
    of_params = [(optimized or {}).get(id(param), dtypes) for param in params]
    kinds = kinds_of(specs, is_kept, config, of_params)
    # Parameters without a place in a chunk wait in RAM, too, where a device gets them in the end.
    never_move = unmanaged_bytes(model.parameters())
    budgets = Budgets(
        host_bytes,
        disk_bytes,
        config.budget(Tier.DEVICE) if device_bytes is None else None,
        device_bytes,
        keep_optim_states=config.host_memory is not None,
        taken_host=never_move,
        taken_device=never_move if config.backend == "cuda" else 0,
        reserved_host=config.reserve_bytes,
    )
    by_index = dict(enumerate(params))
    plan = partial(plan_chunk_groups, model, kinds, by_index, config)
    refusal: PlacementError | None = None
    for activations in config.activation_bytes(host_bytes, device_bytes):
        beside = replace(
            budgets, activations_host=activations[0], activations_device=activations[1]
        )
        try:
            return Arrangement(tuple(params), plan(beside, shard, policy=policy), activations)
        except PlacementError as error:
            refusal = error
            least = config.least_activation_bytes(error.smallest_host_bytes - activations[0])
    assert refusal is not None
    if refusal.smallest_host_bytes > host_bytes:  # of more RAM activations have more
        plan(replace(beside, activations_host=least), shard, policy=policy)
    raise refusal


def likely_host_bytes(
    params: Iterable[torch.nn.Parameter],
    config: Config,
    disk_bytes: int,
    shard: Shard,
    device_bytes: int | None,
) -> int:
    """RAM with which arrange() places a model of which `params` are built so far, as it seems.

    The rest is taken to be more of the same, because a model of a few chunks needs fewer buffers
    than one of many; a module to have two of them, which are gathered together; and what requires
    gradients to have Adam's states.
    """
    model = torch.nn.ModuleList()
    for numel, trains in {(param.numel(), param.requires_grad) for param in params}:
        for _ in range(_LIKELY_LAYERS):
            module = torch.nn.Module()
            for name in ("first", "second"):
                shape = torch.empty(numel, device="meta")
                # (Not registered: ZeroInitContext takes notice of what is.)
                module._parameters[name] = torch.nn.Parameter(shape, trains)
            model.append(module)
    config = replace(config, keep_fp32=())
    try:
        arrange(model, config, config.dtypes, 1, disk_bytes, shard=shard, device_bytes=device_bytes)
    except PlacementError as refusal:
        return refusal.smallest_host_bytes
    return 0


def make_shard(config: Config, world: ProcessGroups, between_devices: bool = False) -> Shard:
    """What this rank has of it all. `between_devices`: ranks' devices exchange by themselves."""
    return Shard(
        world.rank,
        world.ranks,
        params=config.zero_stage >= 3,
        replicas=world.size // world.ranks,
        between_devices=between_devices,
    )


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
    specs: Sequence[ParamSpec], is_kept: Sequence[bool], config: Config, dtypes: Sequence[Dtypes]
) -> list[Kind]:
    """`specs` by their dtypes: those in the compute dtype, then those that are kept in fp32.

    `dtypes` are each parameter's, of its optimizer; where optimizers have other rules or states,
    the kind with most elements is the first.
    """
    kinds: dict[Dtypes, list[ParamSpec]] = {}
    for spec, kept, own in zip(specs, is_kept, dtypes, strict=True):
        kinds.setdefault(_in_fp32(own, config) if kept else own, []).append(spec)
    main = config.dtypes.compute

    def order(kind: Kind) -> tuple[bool, int]:
        return kind[0].compute != main, -sum(spec.numel for spec in kind[1])

    return sorted(kinds.items(), key=order)


def _in_fp32(dtypes: Dtypes, config: Config) -> Dtypes:
    """The dtypes of parameters that are kept in fp32."""
    if dtypes.compute == "fp32":
        return dtypes
    return replace(
        dtypes,
        compute="fp32",
        grad=dtypes.grad if config.grad_dtype else "fp32",
        reduce=dtypes.reduce,
    )


# Where it goes


def place_groups(groups: Sequence[SpecsWithin], budgets: Budgets) -> tuple[ChunkGroupPlan, ...]:
    """Places chunk groups that share budgets: the last one first, the first one gets what is left.

    The first is the largest, as a rule. If what is left is not enough for it, all are placed once
    more, the others with as little as they can work with (_Others).

    Args:
        groups: for each chunk group the specs to try.
        budgets: of all together.

    Raises:
        PlacementError: they do not fit; it has the smallest budgets that work.
    """
    for others in _Others:
        try:
            return _place_in_turn(groups, budgets, others)
        except PlacementError as refusal:
            device_is_short = refusal.smallest_device_bytes > (budgets.device or 0)
            if len(groups) == 1 or (others is _Others.LEAST_RAM and not device_is_short):
                raise
            last = refusal
    raise last


class _Others(enum.Enum):
    """What chunk groups other than the first are given."""

    PREFERRED = "the first placement that fits"
    LEAST_RAM = "the least RAM that they can work with on this DEVICE, as if there were as much"
    LEAST_DEVICE = "the least memory of a DEVICE, and then of RAM, as if there were as much"


def _place_in_turn(
    groups: Sequence[SpecsWithin], left: Budgets, others: _Others
) -> tuple[ChunkGroupPlan, ...]:
    plans: list[ChunkGroupPlan] = []
    for number in reversed(range(len(groups))):
        plans.insert(0, _placed(groups[number], left, others if number else _Others.PREFERRED))
        left = left.minus(plans[0].placement, plans[0].spec.slot)
    return tuple(plans)


def _placed(specs: SpecsWithin, budgets: Budgets, given: _Others) -> ChunkGroupPlan:
    """The first of `specs` that fits; or, if it is given less, the one that works with least."""
    device = budgets.device
    if given is _Others.LEAST_DEVICE and device is not None:
        device = 0
    tried = []
    for spec in specs(budgets):
        if given is not _Others.PREFERRED:
            spec = spec.within(replace(spec.budgets, host=0, device=device))
        try:
            return ChunkGroupPlan(spec, place(spec))
        except PlacementError as error:
            tried.append((error, spec))

    def needs(each: tuple[PlacementError, GroupSpec]) -> tuple[int, int]:
        return max(each[0].smallest_device_bytes, device or 0), each[0].smallest_host_bytes

    refusal, spec = min(tried, key=needs)
    if given is _Others.PREFERRED:
        raise refusal
    enough = replace(spec.budgets, host=refusal.smallest_host_bytes)
    if given is _Others.LEAST_DEVICE and device is not None:
        enough = replace(enough, device=refusal.smallest_device_bytes)
    spec = spec.within(enough)
    return ChunkGroupPlan(spec, place(spec))


def plan_chunk_groups(
    model: torch.nn.Module,
    kinds: Sequence[Kind],
    params: Mapping[int, torch.nn.Parameter],
    config: Config,
    budgets: Budgets,
    shard: Shard,
    first: int = 0,
    policy: str | None = None,
) -> tuple[ChunkGroupPlan, ...]:
    """Lays out and places chunk groups for parameters of several kinds.

    Args:
        model: whose parameters they are.
        kinds: dtypes and specs of the parameters of each chunk group.
        params: by their specs' indices.
        config: the options.
        budgets: of all these chunk groups together.
        shard: what this rank has of it all.
        first: the number of the first of them.
        policy: in the place of the configuration's placement_policy.

    Raises:
        PlacementError: nothing fits; it has the smallest budgets that work.
    """

    def specs_of(offset: int) -> SpecsWithin:
        dtypes, specs = kinds[offset]
        number = first + offset
        chunk_numel = config.chunk_numel
        if chunk_numel is not None and number:
            # Not much more than it has: it may be tiny.
            chunk_numel = min(chunk_numel, sum(round_up(s.numel, ALIGN_NUMEL) for s in specs))
        waiting = 0
        if budgets.under_construction:
            to_come = (spec for _, some in kinds[:offset] for spec in some)
            waiting = waiting_bytes(to_come, shard.ranks, budgets.disk > 0)

        def within(left: Budgets) -> Iterator[GroupSpec]:
            for layout in _layouts(specs, dtypes, chunk_numel, left.host, shard, number):
                chunk_of = {id(params[s.param.index]): c for c in layout.chunks for s in c.slices}
                yield GroupSpec(
                    layout,
                    dtypes,
                    policy or config.placement_policy,
                    replace(left, waiting=waiting),
                    concurrent_slots(_gathered_together(model, chunk_of)),
                    reduce_at_end=number > 0 or config.zero_stage == 1,
                    overlaps_updates=config.debugging.overlap_updates.repeats,
                    checksums=file_checksums(config),
                )

        return within

    return place_groups([specs_of(offset) for offset in range(len(kinds))], budgets)


def file_checksums(config: Config, held_bytes: int = 0) -> FileChecksums | None:
    """What the plan of a chunk group must know of its file's checksums, of which it has some."""
    if not config.has_checksums:
        return None
    return FileChecksums(config.durable, held_bytes)


def _layouts(
    specs: Sequence[ParamSpec],
    dtypes: Dtypes,
    chunk_numel: int | None,
    host_bytes: int,
    shard: Shard,
    number: int,
) -> Iterator[Layout]:
    """Layouts to try: the one that suits the budget, then with ever smaller slots."""
    if chunk_numel is not None:
        # Divisible by the ranks, the rest is padding.
        yield pack(specs, round_up(chunk_numel, shard.slot_multiple), shard, number)
        return
    suits = min(MAX_SLOT_NUMEL, int(host_bytes // _SLOT_SHARE_OF_HOST // dtypes.home_bytes))
    smaller = [MAX_SLOT_NUMEL >> shift for shift in range(MAX_SLOT_NUMEL.bit_length())]
    limits = [suits, *(limit for limit in smaller if limit >= MIN_SLOT_NUMEL)]
    tried = set()
    for limit in limits:
        slot_numel = search_slot_numel(specs, limit, shard)
        if slot_numel not in tried:
            tried.add(slot_numel)
            yield pack(specs, slot_numel, shard, number)


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


def _gathered_together(
    model: torch.nn.Module, chunk_of: Mapping[int, Chunk]
) -> list[tuple[Chunk, ...]]:
    """For each module the chunks that are gathered while it runs: its own and its ancestors'."""
    found: list[tuple[Chunk, ...]] = []

    def visit(module: torch.nn.Module, outer: dict[int, Chunk]) -> None:
        own = [chunk_of[id(p)] for p in module._parameters.values() if id(p) in chunk_of]
        gathered = {**outer, **{c.id: c for c in own}}
        if own:
            found.append(tuple(gathered.values()))
        for child in module.children():
            visit(child, gathered)

    visit(model, {})
    return found
