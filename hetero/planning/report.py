"""A plan in words and figures, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.planning.placement import Placement, PlacementError, SlotBytes
from hetero.planning.search import Plan, plan, smallest_budgets
from hetero.planning.step_cost import RESOURCES
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier

_MORE_BYTES = 1 << 30  # of each budget: what would it buy?
_STEPS = 1000  # for the wear of NVMe


Smallest = Mapping[str, int | None]  # bytes of "host" and "device"


def explain(plans: Sequence[Plan], least: Smallest | None = None) -> str:
    """The table of the plans of one model's chunk groups, the main one first.

    Bytes are of one rank. Takes some plans' time, to say what larger budgets would buy. `least` are
    the smallest budgets that work; None: those of this layout.
    """
    sections = [_memory(plans), _time(plans), _larger(plans), _notes(plans, least)]
    return "\n\n".join(section for section in sections if section)


def as_dict(plans: Sequence[Plan], least: Smallest | None = None) -> dict[str, object]:
    """The same for programs: bytes and seconds."""
    seconds = sum(p.cost.seconds for p in plans)
    return {
        "bytes": {tier.value: by_state_kind for tier, by_state_kind in _bytes(plans).items()},
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
        "one_more_gib_saves_s": _gains(plans),
        "smallest_budgets": dict(least or smallest(plans)),
    }


def smallest(plans: Sequence[Plan]) -> dict[str, int | None]:
    """Bytes of each budget that are just enough for the main chunk group beside the others."""
    host, device = smallest_budgets(plans[0].problem)
    return {"host": host, "device": device}


class Placed(Protocol):
    """A chunk group."""

    @property
    def layout(self) -> Layout: ...
    @property
    def dtypes(self) -> Dtypes: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def plan(self) -> Plan | None: ...


def explain_chunk_groups(
    chunk_groups: Sequence[Placed], budget_bytes: Mapping[str, int | None], expected_tokens: int
) -> str:
    """The table of chunk groups as they are placed; by their plans, if they have some.

    These assumed `expected_tokens` per step, as long as no step was traced.
    """
    plans = [chunk_group.plan for chunk_group in chunk_groups if chunk_group.plan is not None]
    if len(plans) == len(chunk_groups):
        assumed = f"\nIt assumes {expected_tokens} tokens per step (expected_tokens)."
        expected = any(p.problem.trace.expected for p in plans)
        return explain(plans) + (assumed if expected else "")
    limits = {tier: budget_bytes[tier.value] for tier in Tier}
    found = _placed_bytes(
        chunk_groups,
        separate=any(chunk_group.placement.device_bytes for chunk_group in chunk_groups),
    )
    return (
        f"{_memory_table(found, limits)}\n\nNo step time is expected, because the placement was "
        f"chosen by sizes: there was no profile of this machine (hetero profile)."
    )


@dataclass(frozen=True)
class _Planned:
    """A plan as a chunk group that is placed."""

    layout: Layout
    dtypes: Dtypes
    placement: Placement
    plan: Plan | None


def _bytes(plans: Sequence[Plan]) -> dict[Tier, dict[str, int]]:
    chunk_groups = [_Planned(p.problem.layout, p.problem.dtypes, p.placement, p) for p in plans]
    return _placed_bytes(chunk_groups, plans[0].problem.budgets.device is not None)


def _placed_bytes(chunk_groups: Sequence[Placed], separate: bool) -> dict[Tier, dict[str, int]]:
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
    budgets = plans[0].problem.budgets
    limits = {Tier.DEVICE: budgets.device, Tier.HOST: budgets.host, Tier.DISK: budgets.disk}
    return _memory_table(_bytes(plans), limits)


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
    for name, saved in _gains(plans).items():
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


def _gains(plans: Sequence[Plan]) -> dict[str, float]:
    """Seconds that one more GiB of each budget saves, given to the main chunk group."""
    main = plans[0]
    budgets = main.problem.budgets
    larger = {"RAM": replace(budgets, host=budgets.host + _MORE_BYTES)}
    if budgets.device is not None:
        larger = {"DEVICE": replace(budgets, device=budgets.device + _MORE_BYTES), **larger}
    if budgets.disk:
        larger["NVMe"] = replace(budgets, disk=budgets.disk + _MORE_BYTES)
    gains: dict[str, float] = {}
    for name, more in larger.items():
        try:
            now = plan(replace(main.problem, budgets=more)).cost.seconds
        except PlacementError:  # construction may need more of one when there is more of another
            continue
        gains[name] = max(0.0, main.cost.seconds - now)
    return gains


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
