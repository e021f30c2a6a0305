"""Who is measured: each contender is a program of its own that gets the same workload."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.peer_process import path_beside, python_path
from bench.peers.serve import EXIT_MISSING
from hetero.training.options import TrainOptions, to_arguments

PEERS = ("torch", "deepspeed")

DEEPSPEED_INSTALL = (
    "python -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers psutil numpy ninja"
    " setuptools deepspeed (and the system's libaio-dev), then --peer-python VENV/bin/python"
)


@dataclass(frozen=True)
class Contender:
    """A name, a program and where it puts its result; `result_path` None: on its stdout.

    `swap_folder` is removed afterwards: what is swapped there is as large as the model state.
    """

    name: str
    command: tuple[str, ...]
    result_path: Path | None
    log_path: Path
    swap_folder: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """`status` is "finished", "missing" or "failed"; `figures` is empty unless finished."""

    name: str
    status: str
    figures: dict[str, Any]
    error: str | None = None


def hetero_contender(options: TrainOptions, policy: str, folder: Path) -> Contender:
    """`hetero train` under `policy`; a host budget is for the policies that go to disk."""
    own = replace(
        options,
        policy=policy,
        host_memory=None if policy == "cpu" else options.host_memory,
        run_dir=str(folder / f"hetero-{policy}"),
        json=True,
    )
    command = (sys.executable, "-m", "hetero.cli", "train", *to_arguments(own))
    return Contender(f"hetero {policy}", command, None, folder / f"hetero-{policy}.log")


def peer_contenders(peer: str, workload: Path, folder: Path, python: str) -> list[Contender]:
    """The contenders that a name in --peers, one of PEERS, stands for.

    `python` is the interpreter that has DeepSpeed.
    """
    if peer == "torch":
        program = (sys.executable, "-m", "bench.peers.torch_train")
        return [
            _peer(f"torch {mode}", program, mode, workload, folder, None)
            for mode in ("bf16", "autocast")
        ]
    program = (python, "-m", "bench.peers.deepspeed_train")
    swap = folder / "deepspeed-swap"
    return [
        _peer(f"deepspeed {mode}", program, mode, workload, folder, swap)
        for mode in ("cpu", "nvme")
    ]


def _peer(
    name: str,
    program: tuple[str, ...],
    mode: str,
    workload: Path,
    folder: Path,
    swap_folder: Path | None,
) -> Contender:
    stem = name.replace(" ", "-")
    result_path = folder / f"{stem}.json"
    command = [*program, str(workload), str(result_path), mode]
    if swap_folder is not None:
        command.append(str(swap_folder))
    return Contender(name, tuple(command), result_path, folder / f"{stem}.log", swap_folder)


def run_contender(contender: Contender, timeout_s: float) -> Outcome:
    """Runs it to its end; what it prints is in its log."""
    environment = os.environ | {
        "PYTHONPATH": python_path(),
        "PATH": path_beside(contender.command[0]),
    }
    try:
        with contender.log_path.open("w", encoding="utf-8") as log:
            done = subprocess.run(
                contender.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if contender.result_path is None else log,
                stderr=log,
                text=True,
                timeout=timeout_s,
                check=False,
            )
    except FileNotFoundError as error:
        return Outcome(contender.name, "failed", {}, f"cannot start {error.filename}")
    except subprocess.TimeoutExpired:
        return Outcome(contender.name, "failed", {}, f"not done after {timeout_s:.0f} s")
    finally:
        if contender.swap_folder is not None:
            shutil.rmtree(contender.swap_folder, ignore_errors=True)
    if done.returncode == EXIT_MISSING and contender.result_path is not None:
        why = f"{_last_line(contender.log_path)}; install: {DEEPSPEED_INSTALL}"
        return Outcome(contender.name, "missing", {}, why)
    if done.returncode != 0:
        why = f"exit code {done.returncode}: {_last_line(contender.log_path)}"
        return Outcome(contender.name, "failed", {}, f"{why} (all of it in {contender.log_path})")
    text = done.stdout if contender.result_path is None else contender.result_path.read_text()
    return Outcome(contender.name, "finished", json.loads(text))


def _last_line(log_path: Path) -> str:
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")
