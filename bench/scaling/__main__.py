"""Training steps of 8, 64 and 512 ranks: as `hetero plan` predicts them, and simulated.

usage: python -m bench.scaling [--models LIST] [--nodes LIST] [--sequences N] [--chunk-numel N]
                               [--host-memory SIZE] [--device-memory SIZE]
                               [--profile NAME] [--picture FILE] [--json]

Nothing is measured. Machines are those of the profile, each of 8 ranks; where it comes along with
hetero, its figures are from datasheets and from NCCL's own estimates. A rank computes --sequences
of 4096 tokens with activation checkpointing, and updates overlap with nothing.

- "predicted" is the cost model of `hetero plan`, "simulated" the simulation of the order on which
  all ranks agree (bench/scaling/simulation.py); both without stragglers.
- "two levels" is simulated, too: if means were made inside each machine before those between them.
  And "more buckets": if there were twice as many for gradients that wait for their mean.
- Stragglers are of the first model: one rank that is slower, all ranks with jitter, one rank that
  stands still once. Steps with jitter are means of three.

--picture draws the steps, and the stragglers in a second file, whose name ends in -stragglers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from bench.harness.pictures import Chart, Points, draw
from bench.harness.program import Program, options
from bench.harness.tables import Column, number, of_figures
from bench.scaling.cases import LOCAL_RANKS, Case, schedule_of, two_level_means
from bench.scaling.simulation import Schedule, disturbed_s, simulate
from hetero.job.models import MODEL_NAMES
from hetero.planning.collective_cost import Network, all_gather, all_to_all
from hetero.planning.profiles import find_profile
from hetero.reporting.drawing import check_picture
from offload.errors import BudgetError
from offload.profile.machine_profile import Profile

# Each kind of straggler: what it is, how much of it there is, and the unit of a picture's axis.
STRAGGLERS = {
    "slower": ("one rank is slower by", (0.0, 0.05, 0.1, 0.2, 0.3), "%"),
    "jitter": ("each use on each rank varies by (standard deviation)",
               (0.0, 0.05, 0.1, 0.2, 0.4), "%"),
    "stall_s": ("one rank stands still once, for seconds", (0.0, 0.01, 0.02, 0.05, 0.1), "s"),
}  # fmt: skip
SEEDS = 3
LATENCY_SHARE = 0.1
CHUNK_BYTES = tuple(1 << shift for shift in range(20, 33))
OPTIONS = options(
    """
    --models         NAMES    llama-7b,llama-13b,llama-70b  by name
    --nodes          NUMBERS  1,8,64       machines
    --sequences      N        1            of 4096 tokens, that a rank computes in a step
    --chunk-numel    COUNT    -            elements of a chunk (default: as hetero chooses)
    --host-memory    SIZE     -            RAM of a rank, for model state (default: 80%% of it)
    --device-memory  SIZE     -            a device's memory, likewise
    --profile        FILE     8xh200-node  of a machine: a file, or one that comes along
    --picture        FILE     -            .png, .svg or .pdf
    """,
    models=MODEL_NAMES,
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures. Raises ValueError for input that makes no sense."""
    profile = find_profile(arguments.profile)
    models, nodes = arguments.models, sorted(arguments.nodes)
    if arguments.device_memory is not None and not profile.separate:
        raise ValueError(f"--device-memory: {profile.name!r} has no device with memory of its own")
    if Network.of(profile, LOCAL_RANKS, max(nodes)) is None:
        raise ValueError(f"the profile {profile.name!r} says nothing about the network")
    picture = arguments.picture and Path(arguments.picture)
    if picture:
        check_picture("--picture", picture)
    given = arguments.chunk_numel, arguments.host_memory, arguments.device_memory
    steps, stragglers = [], []
    for model in models:
        for count in nodes:
            for hybrid in (False, True) if count > 1 else (False,):
                case = Case(model, count, hybrid, *given, arguments.sequences)
                about = {"model": model, "ranks": case.ranks, "hybrid": hybrid}
                print(f"bench.scaling: {_label(about)}", file=sys.stderr, flush=True)
                try:
                    found, schedule = _simulated(case, profile)
                except BudgetError as error:
                    steps.append({**about, "status": "refused", "reason": str(error)})
                    continue
                steps.append({**about, "status": "planned", **found})
                for kind, (_, amounts, _) in STRAGGLERS.items() if model == models[0] else ():
                    seconds = [_mean_s(schedule, kind, amount) for amount in amounts]
                    row = {**about, "kind": kind, "amounts": amounts, "seconds": seconds}
                    stragglers.append(row)
    result: dict[str, Any] = {
        "profile": {"name": profile.name, "date": profile.date, "source": profile.source},
        "steps": steps,
        "stragglers": stragglers,
        "collectives": [found for n in nodes for found in _collectives(profile, n)],
    }
    if picture:
        second = picture.with_stem(f"{picture.stem}-stragglers")
        charts = _model_charts(steps) | {"latency": _latency_chart(result["collectives"])}
        draw(picture, (10.0, 6.8), charts, [models, ["latency"] * len(models)])
        draw(second, (12.0, 4.1), _straggler_charts(stragglers), [list(STRAGGLERS)], models[0])
        result["pictures"] = [str(picture), str(second)]
    return result


def _simulated(case: Case, profile: Profile) -> tuple[dict[str, Any], Schedule]:
    plan = case.plan(profile)
    schedule = schedule_of(plan.problem, plan.placement)
    roomy = replace(plan.placement, bucket_slots=2 * plan.placement.bucket_slots)
    simulated_s = simulate(schedule)
    return {
        "chunks": len(plan.group.layout.chunks),
        "gathers": len(schedule.gathers),
        "computing_s": schedule.computing_s,
        "predicted_s": plan.cost.seconds,
        "simulated_s": simulated_s,
        "error": plan.cost.seconds / simulated_s - 1,
        "two_level_s": simulate(two_level_means(schedule, plan)),
        "more_buckets_s": simulate(schedule_of(plan.problem, roomy)),
        "bound": plan.cost.bound,
        "bound_s": plan.cost.busy_s[plan.cost.bound],
        "busy_s": plan.cost.busy_s,
        "sent_bytes": plan.cost.traffic["sent"],
    }, schedule


def _mean_s(schedule: Schedule, kind: str, amount: float) -> float:
    seeds = range(SEEDS if kind == "jitter" and amount else 1)
    return mean(simulate(schedule, disturbed_s(schedule, **{kind: amount}, seed=s)) for s in seeds)


def _collectives(profile: Profile, nodes: int) -> Iterator[dict[str, Any]]:
    """What latency is of the collectives of chunks, by their bytes."""
    network = Network.of(profile.share(LOCAL_RANKS), LOCAL_RANKS, nodes)
    assert network is not None
    for name, collective in (("all-gather", all_gather), ("all-to-all", all_to_all)):
        costs = [collective(network, nbytes) for nbytes in CHUNK_BYTES]
        # Seconds of bytes are in proportion to them.
        wanted_s = costs[0].latency_s * (1 / LATENCY_SHARE - 1)
        yield {
            "name": name,
            "ranks": network.ranks,
            "latency_s": costs[0].latency_s,
            "bytes": CHUNK_BYTES,
            "latency_share": [c.latency_s / c.seconds if c.seconds else 0.0 for c in costs],
            "seconds": [cost.seconds for cost in costs],
            "enough_bytes": CHUNK_BYTES[0] * wanted_s / costs[0].transfer_s,
        }


STEPS = (
    Column("compute", "computing_s", number(3)),
    Column("predicted", "predicted_s", number(3)),
    Column("simulated", "simulated_s", number(3)),
    Column("error", "error", "{:+.1%}".format),
    Column("two levels", "two_level_s", number(3)),
    Column("more buckets", "more_buckets_s", number(3)),
    Column("the busiest resource", "bound"),
    Column("seconds", "bound_s", number(3)),
    Column("refused", "reason"),
)
COLLECTIVES = (
    Column("latency, us", "latency_s", number(0, 1e6)),
    Column(f"MB of which latency is {LATENCY_SHARE:.0%}", "enough_bytes", number(0, 1e-6)),
)


def show(result: dict[str, Any]) -> Iterator[str]:
    """The tables."""
    yield f"{result['profile']['name']} ({result['profile']['date']}): nothing is measured"
    yield of_figures("seconds of a step", {_label(row): row for row in result["steps"]}, STEPS)
    for kind, (what, amounts, unit) in STRAGGLERS.items():
        heads = [f"{each:g}" if unit == "s" else f"{each:.0%}" for each in amounts]
        of_kind = [row for row in result["stragglers"] if row["kind"] == kind]
        rows = {_label(row): dict(zip(heads, row["seconds"], strict=True)) for row in of_kind}
        if rows:
            yield of_figures(what, rows, [Column(head, head, number(3)) for head in heads])
    collectives = {f"{row['name']}, {row['ranks']} ranks": row for row in result["collectives"]}
    yield of_figures("collectives of one chunk", collectives, COLLECTIVES)


def _label(row: Mapping[str, Any]) -> str:
    sharing = "a machine shares" if row["hybrid"] else "all share"
    return f"{row['model']}, {row['ranks']} ranks, {sharing}"


# Pictures


def _model_charts(steps: Sequence[Mapping[str, Any]]) -> dict[str, Chart]:
    """The step over its compute by ranks, for each model: bars simulated, marks predicted."""
    from hetero.reporting.palette import INK, SERIES_COLOURS

    bars = (
        ("all share", "simulated_s", False),
        ("means in two levels", "two_level_s", False),
        ("hybrid", "simulated_s", True),
    )
    mark = {"marker": "_", "linestyle": "", "color": INK, "markersize": 16, "markeredgewidth": 2}
    models = list(dict.fromkeys(row["model"] for row in steps))
    charts = {}
    for model in models:
        rows = [row for row in steps if row["model"] == model and row["status"] == "planned"]
        ranks = [f"{count}" for count in sorted({row["ranks"] for row in rows})]
        made, marked = [], []
        for place, (label, key, hybrid) in enumerate(bars):
            own = [row for row in rows if row["hybrid"] is hybrid]
            at = [ranks.index(f"{row['ranks']}") + (place - 1) * 0.26 for row in own]
            heights = [row[key] / row["computing_s"] for row in own]
            look = {"width": 0.26, "color": SERIES_COLOURS[place]}
            made.append(Points(label, at, heights, look))
            if key == "simulated_s":
                marked += [
                    (x, r["predicted_s"] / r["computing_s"]) for x, r in zip(at, own, strict=True)
                ]
        made.append(Points("predicted", [x for x, _ in marked], [y for _, y in marked], mark))
        charts[model] = Chart(
            model, "ranks", "step time / compute alone", made, key=model == models[-1],
            change=partial(_mark_ranks, ranks),
        )  # fmt: skip
    return charts


def _mark_ranks(ranks: Sequence[str], axes: Any) -> None:
    axes.set_xticks(range(len(ranks)), ranks)


def _latency_chart(rows: Sequence[Mapping[str, Any]]) -> Chart:
    made = [
        Points(
            f"{row['name']}, {row['ranks']} ranks",
            [nbytes / (1 << 20) for nbytes in row["bytes"]],
            [100 * share for share in row["latency_share"]],
            _look(row, rows) | {"linestyle": "-" if row["name"] == "all-gather" else ":"},
        )
        for row in rows
    ]
    title = "Latency's part of a collective"
    return Chart(
        title, "chunk size (MiB)", "latency (%)", made, change=lambda a: a.set_xscale("log")
    )


def _straggler_charts(stragglers: Sequence[Mapping[str, Any]]) -> dict[str, Chart]:
    """How much longer a step is than the undisturbed one, by kind of disturbance."""
    charts = {}
    for kind, (what, amounts, unit) in STRAGGLERS.items():
        rows = [row for row in stragglers if row["kind"] == kind]
        scale, made = 100.0 if unit == "%" else 1.0, []
        for row in rows:
            first = row["seconds"][0]
            longer = [(each - first) / (first if unit == "%" else 1) for each in row["seconds"]]
            label = f"{row['ranks']} ranks{', hybrid' if row['hybrid'] else ''}"
            look = _look(row, rows) | {"linestyle": "--" if row["hybrid"] else "-"}
            at, heights = [scale * x for x in amounts], [scale * y for y in longer]
            made.append(Points(label, at, heights, look))
        below, beside = f"amount ({unit})", f"step longer by ({unit})"
        charts[kind] = Chart(what.partition(" (")[0], below, beside, made, kind == "stall_s")
    return charts


def _look(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Colour and marker of a count of ranks."""
    from hetero.reporting.palette import SERIES_COLOURS

    place = sorted({each["ranks"] for each in rows}).index(row["ranks"])
    colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
    return {"color": colour, "marker": "os^Dv"[place % 5], "markersize": 5}


PROGRAM = Program("bench.scaling", __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
