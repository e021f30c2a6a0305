"""A run in words and figures: the table of its page, and of the terminal."""

from __future__ import annotations

from hetero.reporting.palette import LINK_WORDS, TIER_PLACES
from hetero.reporting.run_record import MemoryKind, RunRecord
from offload.memory.sizes import format_bytes

_KINDS = (MemoryKind.PARAM, MemoryKind.GRAD, MemoryKind.OPTIM_STATE)


def rows(record: RunRecord) -> list[tuple[str, str]]:
    """Label and value of every line, in order. The record has at least one step."""
    facts = record.facts
    trained = "" if facts.trained_params is None else f", {facts.trained_params:,} trained"
    params = f"{facts.params:,} parameters{trained if facts.trained_params != facts.params else ''}"
    plain = f"{format_bytes(facts.plain_bytes)} {TIER_PLACES[facts.plain_tier]}"
    each = f"{facts.plain_bytes / facts.params:.3g} bytes per parameter"
    table = [
        ("model", f"{facts.title}, {params}"),
        ("plain PyTorch's model state", f"{plain} ({each})"),
        ("policy, compute", f"{facts.policy}, {facts.dtype}"),
        *facts.rows,
    ]
    if facts.ranks > 1:
        table.append(("ranks", f"{facts.ranks}; bytes are of rank 0"))
    for tier in record.used_tiers:
        peak = f"at most {format_bytes(record.peak_bytes[tier])}, {record.limit_words(tier)}"
        table.append((f"model state {TIER_PLACES[tier]}", peak))
    limit = facts.process_bytes
    of_limit = "" if limit is None else f", of process_memory {format_bytes(limit)}"
    peak = f"at most {format_bytes(record.peak_rss_bytes)}{of_limit}"
    planned = "" if facts.planned_steps is None else f" of {facts.planned_steps:,}"
    error = "" if record.error is None else f": {record.error}"
    split = ", ".join(f"{name} {seconds:.3f}" for name, seconds in record.part_s.items())
    update_s, waited_s = record.mean("update_s"), record.mean("update_wait_s")
    saved = f"overlap saved {max(0.0, update_s - waited_s):.3f} s per step"
    table += [
        ("whole process (RSS)", peak),
        ("steps", f"{record.steps:,}{planned}, {record.status}{error}"),
        ("step time, median", f"{record.step_s:.3f} s: {split}"),
        ("updates", f"{update_s:.3f} s per step, {waited_s:.3f} of them waited for: {saved}"),
    ]
    if placed := placement_words(record):
        table.append(("placement", placed))
    changes = [why for _, why in record.changes]
    table += [("placed again", why) for why in changes]
    table += [("note", note) for note in record.notes if note not in changes]
    if record.predicted is not None and record.predicted["step_s"]:
        predicted_s, ratio = record.predicted["step_s"], record.measured_over_predicted
        split = "; ".join(f"{name} {s:.3f}" for name, s in record.predicted["phases_s"].items())
        words = f"{predicted_s:.3f} s: {split}; bound by {record.predicted['bound']}; measured is"
        ways = [format_bytes(record.predicted[f"nvme_{way}_bytes"]) for way in ("read", "written")]
        nvme = f"NVMe read {ways[0]} and written {ways[1]}, of model state alone"
        table += [
            ("predicted", f"{words} {ratio:.2f} times as much"),
            ("predicted per step", nvme),
        ]
    rate, unit = record.speed
    table.append(("speed", f"{rate} {unit} per second"))
    if links := record.used_links():
        moved = (f"{LINK_WORDS[link]} {format_bytes(record.mean(link))}" for link in links)
        table.append(("moved per step", ", ".join(moved)))
    if facts.ranks > 1:
        waited = f"{record.mean('gather_wait_s'):.3f} s per step"
        table.append(("waited for other ranks' parameters", waited))
    if record.loss_words:
        whose = " (of rank 0)" if facts.ranks > 1 and not facts.losses_are_means else ""
        table.append(("loss", f"{record.loss_words}{whose}"))
    return table


def placement_words(record: RunRecord) -> str:
    """Where each kind of state is at the end, in bytes; "" if that is not known."""
    parts = []
    for kind in _KINDS:
        places = [
            f"{format_bytes(kinds[kind.name])} {TIER_PLACES[tier]}"
            for tier, kinds in record.homes.items()
            if kinds[kind.name]
        ]
        if places:
            parts.append(f"{kind.value} {' and '.join(places)}")
    return "; ".join(parts)
