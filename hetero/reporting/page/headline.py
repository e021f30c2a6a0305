"""What matters of a run, in a few figures and a table."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.reporting.palette import LINK_WORDS, TIER_PLACES
from hetero.reporting.run_record import RunRecord
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier


@dataclass(frozen=True)
class Card:
    """A figure that is seen first: what it is of, the figure, and what to compare it with.

    `share` of a budget that is used, for a bar; None: there is no budget.
    """

    label: str
    value: str
    beside: str
    share: float | None = None


def cards(record: RunRecord) -> list[Card]:
    """Memory by tier first, then speed and loss."""
    facts = record.facts
    found = []
    for tier in record.used_tiers:
        peak, budget = record.peak_bytes[tier], record.largest_budget(tier)
        share = peak / budget if budget else None
        limit = record.limit_words(tier)
        found.append(Card(f"Model state {TIER_PLACES[tier]}", format_bytes(peak), limit, share))
    peak, process = record.peak_rss_bytes, facts.process_bytes
    limit = f"of {format_bytes(process)}" if process else "RAM, no limit"
    share = peak / process if process else None
    found.append(Card("Whole process (RSS)", format_bytes(peak), limit, share))
    if record.tokens_per_s is not None:
        speed, unit = f"{record.tokens_per_s:,.0f}", "tokens per second"
    else:
        speed, unit = f"{1 / record.step_s:.3g}", "steps per second"
    found.append(Card("Speed", speed, f"{unit}, {record.step_s:.3g} s per step"))
    losses = [point.loss for point in record.points if point.loss is not None]
    if losses:
        whose = " (of rank 0)" if facts.ranks > 1 and not facts.losses_are_means else ""
        found.append(Card("Loss, last step", f"{losses[-1]:.4g}", f"{record.loss_words}{whose}"))
    return found


def rows(record: RunRecord) -> list[tuple[str, str]]:
    """Label and value of each line of the table, in order."""
    facts = record.facts
    table = [
        ("model", f"{facts.params:,} parameters, in {facts.dtype}, policy {facts.policy}"),
        (
            "plain PyTorch",
            f"would hold {format_bytes(facts.plain_bytes)} of model state"
            f" {TIER_PLACES[facts.plain_tier]}, and activations",
        ),
        *facts.rows,
    ]
    if facts.ranks > 1:
        table.append(("ranks", f"{facts.ranks}; bytes on this page are of rank 0"))
    table += [
        ("steps", f"{record.steps:,}, {record.status}"),
    ]
    links = record.used_links()
    if links:
        moved = (f"{LINK_WORDS[link]} {format_bytes(record.mean(link))}" for link in links)
        table.append(("moved per step", ", ".join(moved)))
    update_s, waited_s = record.mean("update_s"), record.mean("update_wait_s")
    table.append(("updates", f"{update_s:.3g} s per step, {waited_s:.3g} s of them waited for"))
    if facts.ranks > 1:
        waited_s = record.mean("gather_wait_s")
        table.append(("waited for other ranks' parameters", f"{waited_s:.3g} s per step"))
    table += [("placed again", why) for _, why in record.changes]
    table += [("note", note) for note in record.notes if not _is_said(record, note)]
    return table


def summary(record: RunRecord) -> str:
    """The page in one sentence."""
    facts = record.facts
    held = ", ".join(
        f"{format_bytes(record.peak_bytes[tier])} {TIER_PLACES[tier]}" for tier in record.used_tiers
    )
    has_budget = any(record.largest_budget(tier) is not None for tier in Tier)
    within = "within its budgets" if has_budget else "without a budget"
    kept = "a budget was passed" if record.passed_budgets else within
    return (
        f"Model state took at most {held}, {kept}; plain PyTorch would hold"
        f" {format_bytes(facts.plain_bytes)} of it {TIER_PLACES[facts.plain_tier]}."
    )


def _is_said(record: RunRecord, note: str) -> bool:
    return any(note == why for _, why in record.changes)
