"""A model's placement and its predicted step in words and figures, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetero.planning.candidates import place, smallest_budgets
from hetero.planning.placement import PlacementError, SlotBytes
from hetero.planning.predict import PlacedGroup, Plan
from hetero.planning.step_cost import RESOURCES, CostModel
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

_MORE_BYTES = 1 << 30  # of each budget: what would it buy?
_STEPS = 1000  # for the wear of NVMe

Smallest = Mapping[str, int | None]  # bytes of "host" and "device"


def explain(plans: Sequence[Plan], least: Smallest | None = None) -> str:
    """The table of a model: bytes by tier, seconds of a step, what bounds it, and what would help.

    Args:
        plans: of all chunk groups, the main one first. Bytes are of one rank.
        least: the smallest budgets that work; None: those of these layouts.

    Returns:
        Several lines. What larger budgets would buy takes a few placements' time.
    """
    sections = [_memory(plans), _time(plans), _larger(plans), _notes(plans, least)]
    return "\n\n".join(section for section in sections if section)


def explain_bytes(chunk_groups: Sequence[PlacedGroup], limits: Mapping[Tier, int | None]) -> str:
    """The bytes alone, where nothing is known of a step's seconds.

    Args:
        chunk_groups: all of a model.
        limits: budgets by tier; None: none.
    """
    separate = any(chunk_group.placement.device_bytes for chunk_group in chunk_groups)
    return _memory_table(_bytes(chunk_groups, separate), limits)


def as_dict(plans: Sequence[Plan], least: Smallest | None = None) -> dict[str, object]:
    """What explain() says, for programs: bytes and seconds; arguments as there."""
    seconds = sum(p.cost.seconds for p in plans)
    return {
        "bytes": {tier.value: by_kind for tier, by_kind in _bytes_of_plans(plans).items()},
        "step_s": seconds,
        "phases": [
            {
                "chunk_group": chunk_group,
                "name": phase.name,
                "seconds": phase.seconds,
                "busy_s": phase.busy_s,
            }
            for chunk_group, each in enumerate(plans)
            for phase in each.cost.phases
        ],
        "busy_s": _busy(plans),
        "bound": _bound(plans),
        "traffic_bytes": {
            name: sum(getattr(p.cost.traffic, name) for p in plans)
            for name in ("h2d", "d2h", "nvme_read", "nvme_written", "sent")
        },
        "nvme_bytes_written_per_1000_steps": _STEPS * _written(plans),
        "one_more_gib_saves_s": gains(plans),
        "smallest_budgets": dict(least or smallest(plans)),
    }


def smallest(plans: Sequence[Plan]) -> dict[str, int | None]:
    """Bytes of each budget that are just enough for the main chunk group beside the others."""
    host, device = smallest_budgets(plans[0].group.spec)
    return {"host": host, "device": device}


def gains(plans: Sequence[Plan]) -> dict[str, float]:
    """Seconds of a step that one more GiB of each budget saves, if the main chunk group gets it.

    Returns:
        By "DEVICE", "RAM" and "NVMe", as far as there are such budgets.
    """
    main = plans[0]
    spec = main.group.spec
    budgets = spec.budgets
    larger = {"RAM": replace(budgets, host=budgets.host + _MORE_BYTES)}
    if budgets.device is not None:
        larger = {"DEVICE": replace(budgets, device=budgets.device + _MORE_BYTES), **larger}
    if budgets.disk:
        larger["NVMe"] = replace(budgets, disk=budgets.disk + _MORE_BYTES)
    model = CostModel(main.problem)
    found: dict[str, float] = {}
    for name, more in larger.items():
        try:
            seconds = model.cost(place(spec.within(more))).seconds
        except (PlacementError, ValueError):
            # Construction may need more of one budget when there is more of another, and the
            # profile may say nothing about what a larger budget would use.
            continue
        found[name] = max(0.0, main.cost.seconds - seconds)
    return found


def _bytes_of_plans(plans: Sequence[Plan]) -> dict[Tier, dict[str, int]]:
    separate = plans[0].group.spec.budgets.device is not None
    return _bytes([p.group for p in plans], separate)


def _bytes(chunk_groups: Sequence[PlacedGroup], separate: bool) -> dict[Tier, dict[str, int]]:
    found = {tier: dict.fromkeys(("PARAM", "GRAD", "OPTIM_STATE", "pools"), 0) for tier in Tier}
    for each in chunk_groups:
        made, layout = each.placement, each.layout
        slot = SlotBytes.of(layout, each.dtypes)
        for state_kind, homes, nbytes in (
            ("PARAM", made.param, slot.param),
            ("GRAD", made.grad, slot.grad),
            ("OPTIM_STATE", made.optim_state, slot.optim_state),
        ):
            for chunk in layout.chunks:
                tier = homes[chunk.id]
                if tier is not None:
                    found[tier][state_kind] += chunk.slots * nbytes
        found[Tier.HOST]["pools"] += made.pool_bytes
        if separate:
            found[Tier.DEVICE]["pools"] += (
                made.gathered_slots * slot.gathered + made.grad_offload_bytes
            )
    return found


def _memory(plans: Sequence[Plan]) -> str:
    budgets = plans[0].group.spec.budgets
    limits = {Tier.DEVICE: budgets.device, Tier.HOST: budgets.host, Tier.DISK: budgets.disk}
    return _memory_table(_bytes_of_plans(plans), limits)


def _memory_table(
    found: Mapping[Tier, Mapping[str, int]], limits: Mapping[Tier, int | None]
) -> str:
    names = ("PARAM", "GRAD", "OPTIM_STATE", "pools")
    rows: list[tuple[str, ...]] = [("bytes of a rank", *names, "total", "budget")]
    for tier, limit in limits.items():
        if not limit:
            continue
        values = found[tier]
        total = sum(values.values())
        rows.append(
            (
                tier.name,
                *(format_bytes(values[name]) if values[name] else "-" for name in names),
                format_bytes(total),
                format_bytes(limit),
            )
        )
    return _table(rows)


def _time(plans: Sequence[Plan]) -> str:
    used = [name for name in RESOURCES if any(name in p.cost.busy_s for p in plans)]
    rows: list[tuple[str, ...]] = [("seconds", "expected", *used)]
    names = list(dict.fromkeys(phase.name for p in plans for phase in p.cost.phases))
    for name in names:
        phases = [phase for p in plans for phase in p.cost.phases if phase.name == name]
        busy = [sum(phase.busy_s.get(resource, 0.0) for phase in phases) for resource in used]
        seconds = sum(phase.seconds for phase in phases)
        rows.append(
            (name, _seconds(seconds), *(_seconds(value) if value else "-" for value in busy))
        )
    total = _busy(plans)
    step_s = sum(p.cost.seconds for p in plans)
    rows.append(("step", _seconds(step_s), *(_seconds(total[resource]) for resource in used)))
    bound = _bound(plans)
    share = total[bound] / step_s if step_s else 0.0
    return f"{_table(rows)}\nThe step is bound by: {bound} (busy {share:.0%} of it)."


def _larger(plans: Sequence[Plan]) -> str:
    step_s = sum(p.cost.seconds for p in plans)
    rows = [("one more GiB of", "expected step", "saves")]
    for name, saved in gains(plans).items():
        share = saved / step_s if step_s else 0.0
        rows.append((name, _seconds(step_s - saved), f"{_seconds(saved)} ({share:.1%})"))
    return _table(rows)


def _notes(plans: Sequence[Plan], least: Smallest | None) -> str:
    notes = []
    written = _written(plans)
    if written:
        notes.append(f"NVMe, written per {_STEPS} steps: {format_bytes(_STEPS * written)}.")
    words = [
        f"{format_bytes(n)} ({n} bytes) of {'RAM' if name == 'host' else 'DEVICE'}"
        for name, n in (least or smallest(plans)).items()
        if n is not None
    ]
    notes.append(f"Smallest budgets that work: {', '.join(words)}.")
    if any(p.problem.trace.expected for p in plans):
        notes.append("Computing is estimated from the profile; a traced step would tell better.")
    shard = plans[0].problem.layout.shard
    if shard.ranks * shard.replicas > 1 and plans[0].problem.network_bytes_per_s is None:
        notes.append("The profile says nothing about the network: it is not in the expected time.")
    return "\n".join(notes)


def _busy(plans: Sequence[Plan]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in plans:
        for name, seconds in each.cost.busy_s.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def _bound(plans: Sequence[Plan]) -> str:
    busy = _busy(plans)
    return max(busy, key=busy.__getitem__, default=RESOURCES[0])


def _written(plans: Sequence[Plan]) -> int:
    return sum(p.cost.traffic.nvme_written for p in plans)


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.01 else f"{value:.2g}" if value else "0"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)
