"""A model's placement and its predicted step in words and figures, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetero.planning.candidates import SmallestBudgets, place, smallest_budgets
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.placement import Placement, PlacementError
from hetero.planning.step_cost import TRAFFIC, Plan, StepCost, whole_step
from hetero.text_table import table, wrapped
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

_MORE_BYTES = 1 << 30  # of each budget: what would it buy?
_STEPS = 1000  # for the wear of NVMe
_KINDS = ("PARAM", "GRAD", "OPTIM_STATE", "pools")


def explain(
    plans: Sequence[Plan], least: SmallestBudgets | None = None, width: int | None = None
) -> str:
    """The table of a model: bytes by tier, seconds of a step, what bounds it, and what would help,
    which takes a few placements' time.

    Args:
        plans: of all chunk groups, the main one first. Bytes are of one rank.
        least: the smallest budgets that work; None: those of these layouts.
        width: columns that lines may have; None: as many as they take.
    """
    groups, step = [plan.group for plan in plans], whole_step(plans)
    budgets = groups[0].spec.budgets
    limits = {Tier.DEVICE: budgets.device, Tier.HOST: budgets.host, Tier.DISK: budgets.disk}
    sections = [
        explain_bytes(groups, limits, width),
        _time(step, width),
        _larger(plans, step.seconds),
        "\n".join(wrapped(_notes(plans, step, least or _smallest(plans)), width)),
    ]
    return "\n\n".join(sections)


def explain_bytes(
    groups: Sequence[ChunkGroupPlan], limits: Mapping[Tier, int | None], width: int | None = None
) -> str:
    """The bytes alone, where nothing is known of a step's seconds; `limits`: budgets by tier."""
    found = state_by_tier(groups)
    rows: list[tuple[str, ...]] = [("bytes of a rank", *_KINDS, "total", "budget")]
    for tier, limit in limits.items():
        if limit:
            cells = [format_bytes(n) if n else "-" for n in found[tier].values()]
            total = format_bytes(sum(found[tier].values()))
            rows.append((tier.name, *cells, total, format_bytes(limit)))
    return table(rows, width)


def as_dict(plans: Sequence[Plan], least: SmallestBudgets | None = None) -> dict[str, object]:
    """What explain() says, for programs: bytes and seconds; arguments as there."""
    groups, step = [plan.group for plan in plans], whole_step(plans)
    return {
        "bytes": {tier.value: kinds for tier, kinds in state_by_tier(groups).items()},
        "step_s": step.seconds,
        "phases": [
            {"chunk_group": number, **vars(phase)}
            for number, plan in enumerate(plans)
            for phase in plan.cost.phases
        ],
        "busy_s": step.busy_s,
        "bound": step.bound,
        "traffic_bytes": {name: step.traffic[name] for name in TRAFFIC},
        "nvme_bytes_written_per_1000_steps": _STEPS * step.traffic["nvme_written"],
        "one_more_gib_saves_s": gains(plans),
        "smallest_budgets": dict(least or _smallest(plans)),
    }


def gains(plans: Sequence[Plan]) -> dict[str, float]:
    """Seconds of a step that one more GiB of each budget ("DEVICE", "RAM" and "NVMe", as far as
    there are such budgets) saves, if the main chunk group gets it."""
    main = plans[0]
    spec = main.group.spec
    budgets = spec.budgets
    found: dict[str, float] = {}
    for name, field in (("DEVICE", "device"), ("RAM", "host"), ("NVMe", "disk")):
        limit = getattr(budgets, field)
        if limit is None or (name == "NVMe" and not limit):
            continue
        more = replace(budgets, **{field: limit + _MORE_BYTES})
        try:
            seconds = main.cost_of(place(spec.within(more))).seconds
        except (PlacementError, ValueError):
            # Construction may need more of one budget when there is more of another, and the
            # profile may say nothing about what a larger budget would use.
            continue
        found[name] = max(0.0, main.cost.seconds - seconds)
    return found


def _smallest(plans: Sequence[Plan]) -> SmallestBudgets:
    """For the main chunk group beside the others."""
    spec = plans[0].group.spec

    def place_within(host: int, device: int | None) -> Placement:
        return place(spec.within(replace(spec.budgets, host=host, device=device)))

    return smallest_budgets(place_within, spec.budgets.device)


def state_by_tier(groups: Sequence[ChunkGroupPlan]) -> dict[Tier, dict[str, int]]:
    """Bytes of one rank by tier and kind of state, and of the pools."""
    found = {tier: dict.fromkeys(_KINDS, 0) for tier in Tier}
    for group in groups:
        made, slot = group.placement, group.spec.slot
        on_device = 0  # bytes of homes
        for kind, homes, nbytes in (
            ("PARAM", made.param, slot.param),
            ("GRAD", made.grad, slot.grad),
            ("OPTIM_STATE", made.optim_state, slot.optim_state),
        ):
            for chunk in group.layout.chunks:
                tier = homes[chunk.id]
                if tier is not None:
                    found[tier][kind] += chunk.slots * nbytes
                    on_device += chunk.slots * nbytes if tier is Tier.DEVICE else 0
        found[Tier.HOST]["pools"] += made.pool_bytes
        if group.spec.budgets.device is not None:
            found[Tier.DEVICE]["pools"] += made.device_bytes - on_device
    return found


def _time(step: StepCost, width: int | None) -> str:
    total = step.busy_s
    rows: list[tuple[str, ...]] = [("seconds", "expected", *total)]
    for phase in step.phases:
        busy = [phase.busy_s.get(resource, 0.0) for resource in total]
        cells = [seconds_text(value) if value else "-" for value in busy]
        rows.append((phase.name, seconds_text(phase.seconds), *cells))
    rows.append(("step", seconds_text(step.seconds), *map(seconds_text, total.values())))
    share = total.get(step.bound, 0.0) / step.seconds if step.seconds else 0.0
    return f"{table(rows, width)}\nThe step is bound by: {step.bound} (busy {share:.0%} of it)."


def _larger(plans: Sequence[Plan], step_s: float) -> str:
    rows = [("one more GiB of", "expected step", "saves")]
    for name, saved in gains(plans).items():
        share = saved / step_s if step_s else 0.0
        rows.append((name, seconds_text(step_s - saved), f"{seconds_text(saved)} ({share:.1%})"))
    return table(rows)


def _notes(plans: Sequence[Plan], step: StepCost, least: SmallestBudgets) -> str:
    notes = []
    written = step.traffic["nvme_written"]
    if written:
        notes.append(f"NVMe, written per {_STEPS} steps: {format_bytes(_STEPS * written)}.")
    words = [
        f"{format_bytes(n)} ({n} bytes) of {'RAM' if name == 'host' else 'DEVICE'}"
        for name, n in least.items()
        if n is not None
    ]
    notes.append(f"Smallest budgets that work: {', '.join(words)}.")
    if any(p.computing.expected for p in plans):
        notes.append(
            "Computing is estimated from the profile; a traced step gives a better estimate."
        )
    shard = plans[0].layout.shard
    if shard.ranks * shard.replicas > 1:
        network = plans[0].network
        if network is None:
            notes.append(
                "The profile says nothing about the network: it is not in the expected time."
            )
        elif not (network.node_latency_s if network.nodes > 1 else network.rank_latency_s):
            notes.append("The profile has no latency of the network: collectives take longer.")
    return "\n".join(notes)


def seconds_text(value: float) -> str:
    """Three decimals, and of little two digits."""
    return f"{value:.3f}" if value >= 0.01 else f"{value:.2g}" if value else "0"
