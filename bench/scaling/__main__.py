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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness.program import (
    add_json_argument,
    command_line,
    names,
    parse_count,
    parse_size,
    program_parser,
    run_program,
)
from bench.scaling.cases import LOCAL_RANKS, Case, two_level_means
from bench.scaling.schedule import Schedule, schedule_of
from bench.scaling.simulation import simulate
from bench.scaling.stragglers import Stragglers
from hetero.cli.job.models import MODEL_NAMES
from hetero.cli.show.step_timeline import check_picture
from hetero.planning.collective_cost import CollectiveCost, Network, all_gather, all_to_all
from hetero.planning.profiles import find_profile
from offload.errors import BudgetError
from offload.profile.machine_profile import Profile

MODELS = "llama-7b,llama-13b,llama-70b"
SLOWER = (0.0, 0.05, 0.1, 0.2, 0.3)
JITTER = (0.0, 0.05, 0.1, 0.2, 0.4)
STALL_S = (0.0, 0.01, 0.02, 0.05, 0.1)
SEEDS = 3
LATENCY_SHARE = 0.1
CHUNK_BYTES = tuple(1 << shift for shift in range(20, 33))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    parser = program_parser("bench.scaling", __doc__)
    parser.add_argument(
        "--models", default=MODELS, metavar="LIST", help="by name (default: %(default)s)"
    )
    parser.add_argument(
        "--nodes", default="1,8,64", metavar="LIST", help="machines (default: %(default)s)"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=1,
        metavar="N",
        help="of 4096 tokens, that a rank computes in a step (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk-numel", metavar="N", help="elements of a chunk (default: as hetero chooses)"
    )
    for name, what in (("--host-memory", "RAM"), ("--device-memory", "a device's memory")):
        parser.add_argument(
            name, metavar="SIZE", help=f"{what} of a rank, for model state (default: 80%% of it)"
        )
    parser.add_argument(
        "--profile",
        default="8xh200-node",
        metavar="FILE",
        help="of a machine: a file, or one that comes along (default: %(default)s)",
    )
    parser.add_argument("--picture", metavar="FILE", help=".png, .svg or .pdf")
    add_json_argument(parser)
    arguments = parser.parse_args(argv)
    command = command_line("bench.scaling", argv)
    return run_program("bench.scaling", lambda: run(arguments, command), show, arguments.json)


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """All figures. Raises ValueError for input that makes no sense."""
    profile = find_profile(arguments.profile)
    models, nodes = names(arguments.models), _counts(arguments.nodes)
    if not models:
        raise ValueError("--models must name one at least")
    for model in models:
        if model not in MODEL_NAMES:
            raise ValueError(f"--models: unknown {model!r}; known: {', '.join(MODEL_NAMES)}")
    if arguments.sequences < 1:
        raise ValueError(f"--sequences must be 1 or more, got {arguments.sequences}")
    given = arguments.chunk_numel
    common = Case(
        models[0],
        nodes[0],
        chunk_numel=None if given is None else parse_count("--chunk-numel", given),
        host_bytes=_size("--host-memory", arguments.host_memory),
        device_bytes=_size("--device-memory", arguments.device_memory),
        sequences=arguments.sequences,
    )
    if common.device_bytes is not None and not profile.separate:
        raise ValueError(f"--device-memory: {profile.name!r} has no device with memory of its own")
    if Network.of(profile, LOCAL_RANKS, max(nodes)) is None:
        raise ValueError(f"the profile {profile.name!r} says nothing about the network")
    if arguments.picture is not None:
        check_picture("--picture", Path(arguments.picture))
    cases = [
        replace(common, model=model, nodes=count, hybrid=hybrid)
        for model in models
        for count in nodes
        for hybrid in (False, True)
        if count > 1 or not hybrid
    ]
    result: dict[str, Any] = {
        "command": command,
        "profile": {"name": profile.name, "date": profile.date, "source": profile.source},
        "steps": [_step(case, profile) for case in cases],
        "stragglers": [
            found
            for case in cases
            if case.model == models[0]
            for found in _disturbed(case, profile)
        ],
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


def _size(option: str, text: str | None) -> int | None:
    return None if text is None else parse_size(option, text)


def _counts(text: str) -> list[int]:
    found = [int(each) for each in names(text) if each.isdecimal()]
    if not found or len(found) != len(names(text)) or min(found) < 1:
        raise ValueError(f"--nodes must be numbers such as 1,8,64, got {text!r}")
    return sorted(found)


def _step(case: Case, profile: Profile) -> dict[str, Any]:
    """One case, predicted and simulated; why not, where nothing fits."""
    about = {"model": case.model, "ranks": case.ranks, "hybrid": case.hybrid}
    _tell(f"{case.model}, {case.ranks} ranks{', hybrid' if case.hybrid else ''}")
    try:
        plan = case.plan(profile)
    except BudgetError as error:
        return {**about, "status": "refused", "reason": str(error)}
    schedule = schedule_of(plan.problem, plan.placement)
    simulated_s = simulate(schedule).seconds
    roomy = replace(plan.placement, bucket_slots=2 * plan.placement.bucket_slots)
    return {
        **about,
        "status": "planned",
        "chunks": len(plan.group.layout.chunks),
        "gathers": len(schedule.gathers),
        "computing_s": schedule.computing_s,
        "predicted_s": plan.cost.seconds,
        "simulated_s": simulated_s,
        "error": plan.cost.seconds / simulated_s - 1,
        "two_level_s": simulate(two_level_means(schedule, plan)).seconds,
        "more_buckets_s": simulate(schedule_of(plan.problem, roomy)).seconds,
        "bound": plan.cost.bound,
        "busy_s": plan.cost.busy_s,
        "sent_bytes": plan.cost.traffic["sent"],
    }


def _disturbed(case: Case, profile: Profile) -> Iterator[dict[str, Any]]:
    """The case with stragglers of each kind, from none on."""
    try:
        plan = case.plan(profile)
    except BudgetError:
        return
    schedule = schedule_of(plan.problem, plan.placement)
    about = {"model": case.model, "ranks": case.ranks, "hybrid": case.hybrid}
    for kind, amounts in (("slower", SLOWER), ("jitter", JITTER), ("stall_s", STALL_S)):
        _tell(f"{case.model}, {case.ranks} ranks{', hybrid' if case.hybrid else ''}: {kind}")
        seconds = [_mean_s(schedule, kind, amount) for amount in amounts]
        yield {**about, "kind": kind, "amounts": amounts, "seconds": seconds}


def _mean_s(schedule: Schedule, kind: str, amount: float) -> float:
    seeds = range(SEEDS if kind == "jitter" and amount else 1)
    return mean(
        simulate(schedule, Stragglers(**{kind: amount}, seed=seed)).seconds for seed in seeds
    )


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
            "latency_share": [_latency_share(cost) for cost in costs],
            "seconds": [cost.seconds for cost in costs],
            "enough_bytes": CHUNK_BYTES[0] * wanted_s / costs[0].transfer_s,
        }


def _latency_share(cost: CollectiveCost) -> float:
    return cost.latency_s / cost.seconds if cost.seconds else 0.0


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the tables."""
    about = f"{result['profile']['name']} ({result['profile']['date']}): nothing is measured"
    console.print(f"{result['command']}\n{about}", markup=False, highlight=False, soft_wrap=True)
    steps = _table("seconds of a step", "model", "ranks", "chunks are shared by", "compute")
    for name in ("predicted", "simulated", "error", "two levels", "more buckets"):
        steps.add_column(name, justify="right")
    steps.add_column("the busiest resource")
    for row in result["steps"]:
        cells = [row["model"], str(row["ranks"]), _sharing(row)]
        if row["status"] == "planned":
            cells += [f"{row[f'{name}_s']:.3f}" for name in ("computing", "predicted", "simulated")]
            cells += [f"{row['error']:+.1%}", f"{row['two_level_s']:.3f}"]
            cells.append(f"{row['more_buckets_s']:.3f}")
            cells.append(f"{row['bound']}, {row['busy_s'][row['bound']]:.3f}")
        else:
            cells.append(row["reason"])
        steps.add_row(*cells)
    console.print(steps)
    for kind, title in (
        ("slower", "one rank is slower by"),
        ("jitter", "each use on each rank varies by (standard deviation)"),
        ("stall_s", "one rank stands still once, for seconds"),
    ):
        rows = [row for row in result["stragglers"] if row["kind"] == kind]
        if rows:
            amounts = rows[0]["amounts"]
            heads = [f"{each:g}" if kind == "stall_s" else f"{each:.0%}" for each in amounts]
            table = _table(f"{rows[0]['model']}: {title}", "ranks", "chunks are shared by", *heads)
            for row in rows:
                cells = [f"{seconds:.3f}" for seconds in row["seconds"]]
                table.add_row(str(row["ranks"]), _sharing(row), *cells)
            console.print(table)
    chunks = _table("collectives of one chunk", "", "ranks", "latency, us")
    chunks.add_column(f"bytes of which latency is {LATENCY_SHARE:.0%}, MB", justify="right")
    for row in result["collectives"]:
        chunks.add_row(
            row["name"],
            str(row["ranks"]),
            f"{row['latency_s'] * 1e6:.0f}",
            f"{row['enough_bytes'] / 1e6:.0f}",
        )
    console.print(chunks)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "model") else "right")
    return table


def _sharing(row: dict[str, Any]) -> str:
    return "a machine" if row["hybrid"] else "all ranks"


def _tell(text: str) -> None:
    print(f"bench.scaling: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
