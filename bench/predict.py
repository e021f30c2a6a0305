"""How long steps take, beside how long they were predicted to take, in many configurations.

usage: python -m bench.predict [--model gpt2-medium] [--seq-len 256] [--nvme-path DIR] [--json]

A round measures the machine's profile, then traces one step of the model with all of it in RAM:
its forward and backward are the seconds of computing. From these two alone steps are predicted for
every configuration: policies, shares of the model state in RAM, one and several micro-batches. Then
each is trained for some steps, and the median without the first two is what was measured. The
traced configuration is measured again at the end: what it drifted, no prediction could know.

A machine's disk and clock change within minutes, so each round has a profile and a trace of its
own, errors are taken within a round, and a configuration counts with the median of its errors.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bench.harness.program import Program, left_out, options
from bench.harness.rounds import Rounds, Sample
from bench.harness.tables import Column, Table, middle, number, shown, size
from hetero.job.job import open_job
from hetero.job.loop import one_step
from hetero.job.models import (
    MODEL_NAMES,
    count_parameters,
    model_config,
    wanted_vocab_size,
)
from hetero.job.options import OVERLAPS, TrainOptions
from hetero.job.run_folder import RunFolder
from hetero.planning.profiles import find_profile
from hetero.planning.step_cost import figures, predict
from hetero.planning.step_problem import Computing, Work
from offload.errors import HeteroError
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
TRACED = "traced"


OPTIONS = options(
    """
    --model            NAME   gpt2-medium  by name
    --config           FILE   -            of a model, instead of a name
    --vocab-size       N      -            of the model (default: its own)
    --dtype            NAME   bf16         of computing
    --seq-len          N      256          tokens per sequence
    --batch-size       N      1            sequences per micro-batch
    --steps            N      6            of a configuration, the first two not counted
    --rounds           N      3            of all configurations, one after the other
    --overlap-updates  NAME   auto         as of `hetero train`; with none bytes are exact
    --data             FILE   -            text to train on, as of `hetero train`
    --profile          FILE   -            of this machine (default: measured in each round)
    --nvme-path        DIR    -            folder on NVMe (default: a temporary)
    """,
    model=MODEL_NAMES,
    dtype=STATE_BYTES,
    overlap_updates=OVERLAPS,
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all configurations. Raises ValueError for options that cannot work."""
    if arguments.steps <= SKIPPED_STEPS:
        raise ValueError(f"--steps must be more than {SKIPPED_STEPS}, got {arguments.steps}")
    with tempfile.TemporaryDirectory(prefix="hetero-predict-") as folder:
        paths = (arguments.nvme_path or folder,)
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
        rounds = Rounds()
        for number in range(1, arguments.rounds + 1):
            _tell(f"round {number} of {arguments.rounds}")
            if arguments.profile is None:
                profile = measure_profile(paths, tell=_tell)
            else:
                profile = find_profile(arguments.profile)
            _round(rounds, options, paths, state_bytes, profile, folder)
    drift = max(rounds.values(TRACED, "drift"), key=abs)
    found = rounds.figures()
    traced = found.pop(TRACED)
    errors = errors_of(found)
    beyond = ", ".join(f"{name} {e:+.0%}" for name, e in errors["beyond_goal"].items())
    notes = [
        f"within {GOAL:.0%}: {errors['within_goal']} of {len(found)}; beyond: {beyond or 'none'};"
        f" the traced configuration drifted by {drift:+.0%} within a round",
        *left_out(rounds.failed),
    ]
    if found:
        notes.append(f"error: mean {errors['mean_error']:.1%}, most {errors['worst_error']:.1%}")
    return {
        "params": state_bytes // STATE_BYTES[arguments.dtype],
        "state_bytes": state_bytes,
        "rounds": arguments.rounds,
        "profile": profile.as_dict(),
        "traced": traced,
        "drift": drift,
        "configurations": found,
        "refused": rounds.failed,
        "notes": notes,
        **errors,
    }


def errors_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How far predictions were off, and which ones by more than the goal."""
    errors = {name: middle(row["error"]) for name, row in found.items()}
    sizes = [abs(error) for error in errors.values()]
    return {
        "goal": GOAL,
        "within_goal": sum(size <= GOAL for size in sizes),
        "beyond_goal": {name: error for name, error in errors.items() if abs(error) > GOAL},
        "mean_error": statistics.mean(sizes) if sizes else None,
        "worst_error": max(sizes, default=None),
    }


def _round(
    rounds: Rounds,
    options: TrainOptions,
    paths: tuple[str, ...],
    state_bytes: int,
    profile: Profile,
    folder: str,
) -> None:
    """Adds a sample of every configuration, predicted from one profile and one trace."""
    traced = replace(options, policy="cpu")
    _tell("tracing: all in RAM")
    first = train(traced, folder)
    computing = Computing(first["forward_s"], first["backward_s"])
    for name, made in configurations(options, paths, state_bytes):
        _tell(name)
        try:
            sample = train(made, folder, profile, computing)
        except HeteroError as error:
            _tell(f"  refused: {error}")
            rounds.failed[name] = str(error)
            continue
        told = f"{sample['step_s']:.3f} s, predicted {sample['predicted_step_s']:.3f} s"
        _tell(f"  a step took {told}: {sample['error']:+.0%}")
        rounds.samples.setdefault(name, []).append(sample)
    _tell("tracing once more")
    drift = train(traced, folder)["step_s"] / first["step_s"] - 1
    rounds.samples.setdefault(TRACED, []).append({**first, "drift": drift})


def configurations(
    options: TrainOptions, paths: tuple[str, ...], state_bytes: int
) -> Iterator[tuple[str, TrainOptions]]:
    """CONFIGURATIONS as options, each with its name."""
    for policy, share, accumulate in CONFIGURATIONS:
        name = policy + (f", {share:.0%} in RAM" if share else ", all in RAM")
        name += f", {accumulate} micro-batches" if accumulate > 1 else ""
        yield (
            name,
            replace(
                options,
                policy=policy,
                host_memory=None if share is None else str(int(share * state_bytes)),
                nvme_path=() if policy == "cpu" else paths,
                accumulate=accumulate,
            ),
        )


def train(
    options: TrainOptions,
    folder: str,
    profile: Profile | None = None,
    computing: Computing | None = None,
) -> Sample:
    """Medians of the steps, in seconds and bytes.

    With a profile and the seconds of computing one micro-batch what was predicted before them, too,
    each beside what was measured, and the error of the step.
    """
    gc.collect()
    predicted: dict[str, float] = {}
    with RunFolder(folder) as run_folder, open_job(options, run_folder) as job:
        if profile is not None and computing is not None:
            batches = options.accumulate
            plans = predict(
                job.engine.watch.budget_moves.group_plans(),
                profile,
                Work(options.batch_size * options.seq_len, batches),
                Computing(computing.forward_s * batches, computing.backward_s * batches),
                grad_factors=options.clip > 0,
                overlap=options.overlap,
            )
            made = figures(plans)
            predicted = {f"predicted_{key}": made[key] for key in ("step_s", *MOVED)}
            predicted |= {
                f"predicted_{name}_s": made["phases_s"][phase]
                for name, phase in PHASES.items()
                if phase in made["phases_s"]  # else it was predicted together with others
            }
        steps = [one_step(job, step) for step in range(1, options.steps + 1)]
    steady = steps[SKIPPED_STEPS:]
    measured = {"step_s": statistics.median(step.seconds for step in steady)}
    for name in PHASES:
        measured[f"{name}_s"] = statistics.median(step.parts_s[name] for step in steady)
    for key, link in MOVED.items():
        measured[key] = statistics.mean(step.traffic_bytes[link] for step in steady)
    if predicted:
        predicted["error"] = predicted["predicted_step_s"] / measured["step_s"] - 1
    return {**measured, **predicted}


MOVED = {"nvme_read_bytes": "disk_read", "nvme_written_bytes": "disk_write"}


def _error(value: Mapping[str, float]) -> str:
    return f"{value['median']:+.0%} ({value['min']:+.0%} to {value['max']:+.0%})"


def _tell(text: str) -> None:
    print(f"bench.predict: {text}", file=sys.stderr, flush=True)


TABLE = Table(
    lambda result: (
        f"bench.predict: {result['params']:,} parameters, {size(result['state_bytes'])} of state;"
        f" median of {result['rounds']} rounds"
    ),
    "configurations",
    (
        Column("step s", "step_s", number(3)),
        Column("predicted", "predicted_step_s", number(3)),
        Column("error", "error", _error),
        *(
            Column(title, f"{before}{name}_s", number())
            for name in PHASES
            for title, before in ((name, ""), ("predicted", "predicted_"))
        ),
        *(
            Column(title, f"{before}{key}", number(2, 1e-9))
            for key, verb in (("nvme_read_bytes", "read"), ("nvme_written_bytes", "written"))
            for title, before in ((f"{verb} GB", ""), ("predicted", "predicted_"))
        ),
    ),
)
PROGRAM = Program("bench.predict", __doc__, OPTIONS, run, shown(TABLE))
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
