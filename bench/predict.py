"""How long steps take, beside how long they were predicted to take, in many configurations.

usage: python -m bench.predict [--model gpt2-medium] [--seq-len 256] [--nvme-path DIR] [--json]

A round measures the machine's profile, then traces one step of the model with all of it in RAM:
its forward and backward are the seconds of computing. From these two alone steps are predicted for
every configuration: policies, shares of the model state in RAM, one and several micro-batches. Then
each is trained for some steps, and the median without the first two is what was measured. The
traced configuration is measured again at the end: what it drifted, no prediction could know.

A machine's disk and clock change within minutes, so each round has a profile and a trace of its
own, errors are taken within a round, and a configuration counts with the round of its median error.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.harness.program import (
    FILE,
    Option,
    Program,
    one_of,
    titled,
    whole,
)
from hetero.cli.job.job import open_job
from hetero.cli.job.models import (
    MODEL_NAMES,
    count_parameters,
    model_config,
    wanted_vocab_size,
)
from hetero.cli.job.options import OVERLAPS, TrainOptions
from hetero.cli.job.run_folder import RunFolder
from hetero.cli.job.step import one_step
from hetero.planning.predict import figures, predict
from hetero.planning.profiles import find_profile
from hetero.planning.trace import Computing, Work
from offload.errors import HeteroError
from offload.memory.sizes import format_bytes
from offload.profile.machine_profile import Profile
from offload.profile.measure import measure_profile

SKIPPED_STEPS = 2
STATE_BYTES = {
    "bf16": 14,
    "fp16": 16,
    "fp32": 16,
}  # of parameter, gradient and optimizer state, with AdamW
GOAL = 0.15

# Policy, host memory as a share of the model state (None: no limit), micro-batches per step.
CONFIGURATIONS: tuple[tuple[str, float | None, int], ...] = (
    ("cpu", None, 1),
    ("cpu", None, 4),
    ("auto", 0.8, 1),
    ("auto", 0.6, 1),
    ("auto", 0.4, 1),
    ("auto", 0.4, 4),
    ("auto", 0.25, 1),
    ("nvme", 0.6, 1),
    ("nvme", 0.45, 1),
    ("nvme", 0.45, 4),
    ("nvme", 0.3, 1),
    ("nvme", 0.25, 1),
    ("nvme", 0.25, 4),
)


# Names of what is measured, and of what is predicted.
PHASES = {"forward": "forward", "backward": "backward", "optimizer": "update"}


@dataclass(frozen=True)
class Measured:
    """Medians of the steps of one configuration, in seconds and bytes."""

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    nvme_read_bytes: float
    nvme_written_bytes: float


OPTIONS = (
    Option("--model", "gpt2-medium", "by name", one_of(MODEL_NAMES)),
    Option("--config", None, "of a model, instead of a name", FILE),
    Option("--vocab-size", None, "of the model (default: its own)", whole()),
    Option("--dtype", "bf16", f"of {', '.join(STATE_BYTES)}", one_of(STATE_BYTES)),
    Option("--seq-len", "256", "tokens per sequence", whole()),
    Option("--batch-size", "1", "sequences per micro-batch", whole()),
    Option("--steps", "6", "of a configuration, the first two not counted", whole()),
    Option("--rounds", "3", "of all configurations, one after the other", whole()),
    Option(
        "--overlap-updates",
        TrainOptions.overlap_updates,
        "as of `hetero train`; with none bytes are predicted exactly",
        one_of(OVERLAPS),
    ),
    Option("--data", None, "text to train on, as of `hetero train`", FILE),
    Option("--profile", None, "of this machine (default: measured in each round)", FILE),
)


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nvme-path", action="append", metavar="DIR", help="folder on NVMe (default: a temporary)"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all configurations. Raises ValueError for options that cannot work."""
    if arguments.steps <= SKIPPED_STEPS:
        raise ValueError(f"--steps must be more than {SKIPPED_STEPS}, got {arguments.steps}")
    with tempfile.TemporaryDirectory(prefix="hetero-predict-") as folder:
        paths = tuple(arguments.nvme_path or [folder])
        options = TrainOptions(
            model=arguments.model,
            config=arguments.config,
            vocab_size=wanted_vocab_size(arguments.model, arguments.config, arguments.vocab_size),
            data=arguments.data,
            dtype=arguments.dtype,
            steps=arguments.steps,
            seq_len=arguments.seq_len,
            batch_size=arguments.batch_size,
            schedule="constant",
            warmup=0,
            save_model=False,
            overlap_updates=arguments.overlap_updates,
            run_dir=folder,
        )
        state_bytes = STATE_BYTES[arguments.dtype] * count_parameters(model_config(options))
        rounds = []
        for number in range(1, arguments.rounds + 1):
            _tell(f"round {number} of {arguments.rounds}")
            if arguments.profile is None:
                profile = measure_profile(paths, tell=_tell)
            else:
                profile = find_profile(arguments.profile)
            rounds.append(_round(options, paths, state_bytes, profile, folder))
    rows = [_middle(tries) for tries in zip(*(made["rows"] for made in rounds), strict=True)]
    return {
        "params": state_bytes // STATE_BYTES[arguments.dtype],
        "state_bytes": state_bytes,
        "rounds": [{k: v for k, v in made.items() if k != "rows"} for made in rounds],
        "drift": max((made["drift"] for made in rounds), key=abs),
        "configurations": rows,
        **errors_of(rows),
    }


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far predictions were off, and which ones by more than the goal."""
    errors = {row["name"]: row["error"] for row in rows if row["status"] == "measured"}
    sizes = [abs(error) for error in errors.values()]
    return {
        "goal": GOAL,
        "within_goal": sum(size <= GOAL for size in sizes),
        "beyond_goal": {name: error for name, error in errors.items() if abs(error) > GOAL},
        "mean_error": statistics.mean(sizes) if sizes else None,
        "median_error": statistics.median(sizes) if sizes else None,
        "worst_error": max(sizes, default=None),
    }


def _round(
    options: TrainOptions,
    paths: tuple[str, ...],
    state_bytes: int,
    profile: Profile,
    folder: str,
) -> dict[str, Any]:
    """Every configuration once, predicted from one profile and one trace."""
    traced = replace(options, policy="cpu")
    _tell("tracing: all in RAM")
    first = train(traced, folder)
    computing = Computing(first.forward_s, first.backward_s)
    rows = [
        _row(made, state_bytes, profile, computing, folder)
        for made in configurations(options, paths, state_bytes)
    ]
    _tell("tracing once more")
    last = train(traced, folder)
    return {
        "profile": profile.as_dict(),
        "traced": {"forward_s": computing.forward_s, "backward_s": computing.backward_s},
        "drift": last.step_s / first.step_s - 1,
        "rows": rows,
    }


def _middle(tries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of the round with the median error; all rounds' errors beside it."""
    measured = sorted((t for t in tries if t["status"] == "measured"), key=lambda t: t["error"])
    if not measured:
        return tries[0]
    row = measured[(len(measured) - 1) // 2]
    return {**row, "errors": [t["error"] for t in measured]}


def configurations(
    options: TrainOptions, paths: tuple[str, ...], state_bytes: int
) -> Iterator[TrainOptions]:
    """CONFIGURATIONS as options."""
    for policy, share, accumulate in CONFIGURATIONS:
        yield replace(
            options,
            policy=policy,
            host_memory=None if share is None else str(int(share * state_bytes)),
            nvme_path=() if policy == "cpu" else paths,
            accumulate=accumulate,
        )


def _row(
    options: TrainOptions, state_bytes: int, profile: Profile, computing: Computing, folder: str
) -> dict[str, Any]:
    host = int(options.host_memory or 0)
    name = options.policy + (f", {host / state_bytes:.0%} in RAM" if host else ", all in RAM")
    name += f", {options.accumulate} micro-batches" if options.accumulate > 1 else ""
    _tell(name)
    row: dict[str, Any] = {
        "name": name,
        "policy": options.policy,
        "host_memory": host or None,
        "accumulate": options.accumulate,
    }
    try:
        predictions: list[dict[str, Any]] = []
        measured = train(options, folder, profile, computing, predictions)
    except HeteroError as error:
        _tell(f"  refused: {error}")
        return {**row, "status": "refused", "reason": str(error)}
    (made,) = predictions
    off = made["step_s"] / measured.step_s - 1
    _tell(f"  a step took {measured.step_s:.3f} s, predicted {made['step_s']:.3f} s: {off:+.0%}")
    return {
        **row,
        "status": "measured",
        "measured": vars(measured),
        "predicted": made,
        "error": off,
    }


def train(
    options: TrainOptions,
    folder: str,
    profile: Profile | None = None,
    computing: Computing | None = None,
    predictions: list[dict[str, Any]] | None = None,
) -> Measured:
    """Makes the steps; before them, with a profile, appends what is predicted to `predictions`."""
    gc.collect()
    with RunFolder(folder) as run_folder, open_job(options, run_folder) as job:
        if profile is not None and predictions is not None:
            batches = options.accumulate
            whole = None
            if computing is not None:  # of one micro-batch
                whole = Computing(computing.forward_s * batches, computing.backward_s * batches)
            work = Work(options.batch_size * options.seq_len, batches)
            plans = predict(
                job.engine.budget_moves.group_plans(),
                profile,
                work,
                whole,
                grad_factors=options.clip > 0,
                overlap=options.overlap,
            )
            predictions.append(figures(plans))
        steps = [one_step(job, step) for step in range(1, options.steps + 1)]
    steady = steps[SKIPPED_STEPS:]

    def median(name: str) -> float:
        return float(statistics.median(getattr(step, name) for step in steady))

    def moved(link: str) -> float:
        return statistics.mean(step.traffic_bytes[link] for step in steady)

    return Measured(
        step_s=median("step_s"),
        forward_s=median("forward_s"),
        backward_s=median("backward_s"),
        optimizer_s=median("optimizer_s"),
        nvme_read_bytes=moved("disk_read"),
        nvme_written_bytes=moved("disk_write"),
    )


def show(result: dict[str, Any]) -> Iterator[str]:
    """The table, and how far predictions were off."""
    rows = [["configuration", "step", "error", "forward", "backward", "optimizer", "read",
             "written", "bound"]]  # fmt: skip
    for row in result["configurations"]:
        if row["status"] != "measured":
            rows.append([row["name"], row["status"], *[""] * 7])
            continue
        measured, predicted = row["measured"], row["predicted"]
        rows.append(
            [
                row["name"],
                f"{measured['step_s']:.3f} / {predicted['step_s']:.3f}",
                f"{row['error']:+.0%} ({min(row['errors']):+.0%} to {max(row['errors']):+.0%})",
                *(
                    _beside(measured[f"{part}_s"], predicted["phases_s"].get(phase))
                    for part, phase in PHASES.items()
                ),
                *(
                    f"{measured[f'nvme_{verb}_bytes'] / 1e9:.2f} / "
                    f"{predicted[f'nvme_{verb}_bytes'] / 1e9:.2f}"
                    for verb in ("read", "written")
                ),
                predicted["bound"],
            ]
        )
    yield titled("seconds measured / predicted, GB per step", rows)
    count = sum(row["status"] == "measured" for row in result["configurations"])
    yield (
        f"{result['params']:,} parameters, {format_bytes(result['state_bytes'])} of state. Within"
        f" {result['goal']:.0%}: {result['within_goal']} of {count}. The traced configuration"
        f" drifted by {result['drift']:+.0%} within a round."
    )
    if count:
        beyond = ", ".join(f"{name} {e:+.0%}" for name, e in result["beyond_goal"].items())
        yield (
            f"error: mean {result['mean_error']:.1%}, median {result['median_error']:.1%}, largest"
            f" {result['worst_error']:.1%}; beyond {result['goal']:.0%}: {beyond or 'none'}"
        )


def _beside(measured_s: float, predicted_s: float | None) -> str:
    """(None: the phase was predicted together with others.)"""
    return f"{measured_s:.2f}" + ("" if predicted_s is None else f" / {predicted_s:.2f}")


def _tell(text: str) -> None:
    print(f"bench.predict: {text}", file=sys.stderr, flush=True)


PROGRAM = Program("bench.predict", __doc__, OPTIONS, run, show, _add_path)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
