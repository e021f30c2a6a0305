"""Steps beside what they were predicted to take, in many configurations.

usage: python -m bench.predict [options of `hetero train`] [--only nvme] [--json]

A round measures the machine's profile, then traces one step of the model with all of it in RAM:
its forward and backward are the seconds of computing. From these two alone steps are predicted for
every configuration: policies, shares of the model state in RAM, one and several micro-batches. Then
each is trained for some steps, and the median without the first two is what was measured. (With
--overlap-updates none predicted bytes are exact.)

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

from bench.harness.program import Program, add_options, left_out, tell, whole
from bench.harness.rounds import Rounds, Sample
from bench.harness.tables import middle, number, of_figures, size
from bench.work.job_steps import add_job_options, job_options
from hetero.job.job import open_job
from hetero.job.loop import one_step
from hetero.job.models import count_parameters, model_config
from hetero.job.options import TrainOptions
from hetero.job.run_folder import RunFolder
from hetero.overlap import OverlapUpdates
from hetero.planning.profiles import find_profile
from hetero.planning.step_cost import Computing, Work, figures, predict
from offload.errors import HeteroError
from offload.profile.machine_profile import Profile
from offload.profile.measure import measure_profile

SKIPPED_STEPS = 2
# Of parameter, gradient and optimizer state, with AdamW.
STATE_BYTES = {"bf16": 14, "fp16": 16, "fp32": 16}
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
MOVED = {"nvme_read_bytes": "disk_read", "nvme_written_bytes": "disk_write"}


def options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser, steps=6, dtype="bf16")
    add_options(
        parser.add_argument_group("benchmark"),
        ("--rounds", whole(), "3", "of all configurations, one after the other"),
        ("--only", str, "", "part of the names of the configurations that are measured; else all"),
        ("--profile", str, None, "file, of this machine; else it is measured in each round"),
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all configurations. Raises ValueError for options that cannot work."""
    rounds, options = Rounds(), job_options(arguments)
    if options.steps <= SKIPPED_STEPS:
        raise ValueError(f"--max-steps must be {SKIPPED_STEPS + 1} or more, got {options.steps}")
    with tempfile.TemporaryDirectory(prefix="hetero-predict-") as folder:
        paths = options.nvme_path or (folder,)
        params = count_parameters(model_config(options))
        state_bytes = STATE_BYTES[options.dtype or "bf16"] * params
        for round_number in range(1, arguments.rounds + 1):
            tell(f"bench.predict: round {round_number} of {arguments.rounds}")
            if arguments.profile is None:
                profile = measure_profile(paths, tell=tell)
            else:
                profile = find_profile(arguments.profile)
            traced = train(replace(options, policy="cpu"), folder)
            rounds.samples.setdefault("traced", []).append(traced)
            for name, made in configurations(options, paths, state_bytes):
                if arguments.only not in name:
                    continue
                try:
                    sample = train(made, folder, profile, traced)
                except HeteroError as error:
                    rounds.failed[name] = str(error)
                    continue
                tell(f"{name}: {sample['step_s']:.3f} s, error {sample['error']:+.0%}")
                rounds.samples.setdefault(name, []).append(sample)
    found = rounds.figures()
    traced_figures = found.pop("traced")
    errors = {name: abs(middle(row["error"])) for name, row in found.items()}
    within = sum(error <= GOAL for error in errors.values())
    notes = [f"within {GOAL:.0%}: {within} of {len(found)}", *left_out(rounds.failed)]
    if found:
        mean, most = statistics.mean(errors.values()), max(errors.values())
        notes.append(f"error: mean {mean:.1%}, most {most:.1%}")
    return {
        "params": params,
        "rounds": arguments.rounds,
        "profile": profile.as_dict(),
        "traced": traced_figures,
        "configurations": found,
        "refused": rounds.failed,
        "within_goal": within,
        "notes": notes,
    }


def configurations(
    options: TrainOptions, paths: tuple[str, ...], state_bytes: int
) -> Iterator[tuple[str, TrainOptions]]:
    """CONFIGURATIONS as options, each with its name."""
    for policy, share, accumulate in CONFIGURATIONS:
        name = policy + (f", {share:.0%} in RAM" if share else ", all in RAM")
        name += f", {accumulate} micro-batches" if accumulate > 1 else ""
        own = replace(
            options,
            policy=policy,
            host_memory=None if share is None else str(int(share * state_bytes)),
            nvme_path=() if policy == "cpu" else paths,
            accumulate=accumulate,
        )
        yield name, own


def train(
    options: TrainOptions,
    folder: str,
    profile: Profile | None = None,
    traced: Sample | None = None,
) -> Sample:
    """Medians of the steps, in seconds and bytes.

    With a profile and the step in RAM of one micro-batch what was predicted before them, too, each
    beside what was measured, with the error of the step.
    """
    gc.collect()
    predicted: dict[str, float] = {}
    batches = options.accumulate
    with RunFolder(folder) as run_folder, open_job(options, run_folder) as job:
        if profile is not None and traced is not None:
            plans = predict(
                job.engine.watch.budget_moves.group_plans(),
                profile,
                Work(options.batch_size * options.seq_len, batches),
                Computing(traced["forward_s"] * batches, traced["backward_s"] * batches),
                # All steps are clipped: no guess of an update during backward is right.
                overlap=OverlapUpdates.FORWARD
                if options.overlap is OverlapUpdates.AUTO and options.clip
                else options.overlap,
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


def _error(value: Mapping[str, float]) -> str:
    return f"{value['median']:+.0%} ({value['min']:+.0%} to {value['max']:+.0%})"


COLUMNS = (
    ("step s", "step_s", number(3)),
    ("predicted", "predicted_step_s", number(3)),
    ("error", "error", _error),
    *((name, f"{name}_s", number()) for name in PHASES),
    *((f"predicted {name}", f"predicted_{name}_s", number()) for name in PHASES),
    ("read", "nvme_read_bytes", size),
    ("predicted read", "predicted_nvme_read_bytes", size),
    ("written", "nvme_written_bytes", size),
    ("predicted written", "predicted_nvme_written_bytes", size),
)


def show(result: dict[str, Any]) -> Iterator[str]:
    """A row for each configuration."""
    title = f"bench.predict: {result['params']:,} parameters; median of {result['rounds']} rounds"
    yield of_figures(title, result["configurations"], COLUMNS)
    yield from result["notes"]


PROGRAM = Program("bench.predict", __doc__, options, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
