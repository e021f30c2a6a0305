"""Training steps of 8, 64 and 512 ranks: as `hetero plan` predicts them, and simulated.

usage: python -m bench.scaling [--models LIST] [--nodes LIST] [--sequences N] [--chunk-numel N]
                               [--host-memory SIZE] [--device-memory SIZE]
                               [--profile NAME] [--picture FILE] [--json]

Nothing is measured. Machines are those of the profile, each of 8 ranks; where it comes along with
hetero, its figures are from datasheets and from NCCL's own estimates. A rank computes --sequences
of 4096 tokens with activation checkpointing, and updates overlap with nothing.

- "predicted" is the cost model of `hetero plan`, "simulated" the discrete-event simulation of the
  order on which all ranks agree (bench/scaling/simulation.py); both without stragglers.
- "two levels" is simulated, too: if means were made inside each machine before those between them.
  And "more buckets": if there were twice as many for gradients that wait for their mean.
- Stragglers are of the first model: one rank that is slower, all ranks with jitter, one rank that
  stands still once. Steps with jitter are means of three.

--picture draws the steps, and the stragglers in a second file, whose name ends in -stragglers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from bench.harness.program import (
    COUNT,
    FILE,
    SIZE,
    Option,
    Program,
    list_of,
    some_of,
    whole,
)
from bench.harness.tables import Column, number, of_figures
from bench.scaling.cases import LOCAL_RANKS, Case, schedule_of, two_level_means
from bench.scaling.simulation import Schedule, disturbed_s, simulate
from hetero.job.models import MODEL_NAMES
from hetero.planning.collective_cost import Network, all_gather, all_to_all
from hetero.planning.profiles import find_profile
from hetero.reporting.drawing import check_picture
from offload.errors import BudgetError
from offload.profile.machine_profile import Profile

# Each kind of straggler: what it is, and how much of it there is.
STRAGGLERS = {
    "slower": ("one rank is slower by", (0.0, 0.05, 0.1, 0.2, 0.3)),
    "jitter": (
        "each use on each rank varies by (standard deviation)",
        (0.0, 0.05, 0.1, 0.2, 0.4),
    ),
    "stall_s": ("one rank stands still once, for seconds", (0.0, 0.01, 0.02, 0.05, 0.1)),
}
SEEDS = 3
LATENCY_SHARE = 0.1
CHUNK_BYTES = tuple(1 << shift for shift in range(20, 33))
OPTIONS = (
    Option("--models", "llama-7b,llama-13b,llama-70b", "by name", some_of(MODEL_NAMES)),
    Option("--nodes", "1,8,64", "machines", list_of(whole())),
    Option("--sequences", "1", "of 4096 tokens, that a rank computes in a step", whole()),
    Option("--chunk-numel", None, "elements of a chunk (default: as hetero chooses)", COUNT),
    Option("--host-memory", None, "RAM of a rank, for model state (default: 80%% of it)", SIZE),
    Option("--device-memory", None, "a device's memory, likewise", SIZE),
    Option("--profile", "8xh200-node", "of a machine: a file, or one that comes along", FILE),
    Option("--picture", None, ".png, .svg or .pdf", FILE),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures. Raises ValueError for input that makes no sense."""
    profile = find_profile(arguments.profile)
    models, nodes = arguments.models, sorted(arguments.nodes)
    if arguments.device_memory is not None and not profile.separate:
        raise ValueError(f"--device-memory: {profile.name!r} has no device with memory of its own")
    if Network.of(profile, LOCAL_RANKS, max(nodes)) is None:
        raise ValueError(f"the profile {profile.name!r} says nothing about the network")
    if arguments.picture is not None:
        check_picture("--picture", Path(arguments.picture))
    given = arguments.chunk_numel, arguments.host_memory, arguments.device_memory
    cases = [
        Case(model, count, hybrid, *given, arguments.sequences)
        for model in models
        for count in nodes
        for hybrid in (False, True)
        if count > 1 or not hybrid
    ]
    steps, stragglers = [], []
    for case in cases:
        about = {"model": case.model, "ranks": case.ranks, "hybrid": case.hybrid}
        label = f"{case.model}, {case.ranks} ranks{', hybrid' if case.hybrid else ''}"
        print(f"bench.scaling: {label}", file=sys.stderr, flush=True)
        try:
            plan = case.plan(profile)
        except BudgetError as error:
            steps.append({**about, "status": "refused", "reason": str(error)})
            continue
        schedule = schedule_of(plan.problem, plan.placement)
        roomy = replace(plan.placement, bucket_slots=2 * plan.placement.bucket_slots)
        simulated_s = simulate(schedule)
        steps.append(
            {
                **about,
                "status": "planned",
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
            }
        )
        for kind, (_, amounts) in STRAGGLERS.items() if case.model == models[0] else ():
            seconds = [_mean_s(schedule, kind, amount) for amount in amounts]
            stragglers.append({**about, "kind": kind, "amounts": amounts, "seconds": seconds})
    result: dict[str, Any] = {
        "profile": {"name": profile.name, "date": profile.date, "source": profile.source},
        "steps": steps,
        "stragglers": stragglers,
        "collectives": [found for n in nodes for found in _collectives(profile, n)],
    }
    if arguments.picture is not None:
        from bench.scaling.figures import draw_steps, draw_stragglers

        picture = Path(arguments.picture)
        second = picture.with_stem(f"{picture.stem}-stragglers")
        draw_steps(result, picture)
        draw_stragglers(result, second)
        result["pictures"] = [str(picture), str(second)]
    return result


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
    for kind, (what, amounts) in STRAGGLERS.items():
        heads = [f"{each:g}" if kind == "stall_s" else f"{each:.0%}" for each in amounts]
        rows = {
            _label(row): dict(zip(heads, row["seconds"], strict=True))
            for row in result["stragglers"]
            if row["kind"] == kind
        }
        if rows:
            yield of_figures(what, rows, [Column(head, head, number(3)) for head in heads])
    collectives = {f"{row['name']}, {row['ranks']} ranks": row for row in result["collectives"]}
    yield of_figures("collectives of one chunk", collectives, COLLECTIVES)


def _label(row: dict[str, Any]) -> str:
    sharing = "a machine shares" if row["hybrid"] else "all share"
    return f"{row['model']}, {row['ranks']} ranks, {sharing}"


PROGRAM = Program("bench.scaling", __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
