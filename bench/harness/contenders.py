"""Who is measured: each contender is a program of its own that gets the same workload."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness.hosts import Hosts
from bench.harness.peer_process import DEEPSPEED_INSTALL, import_environment, path_beside
from bench.harness.ranks import RankError, last_line, rank_log, run_ranks
from bench.peers.serve import EXIT_MISSING
from hetero.job.options import TrainOptions, to_arguments

PEERS = ("torch", "ddp", "fsdp2", "deepspeed")
ONE_RANK_PEERS = ("torch",)
SEVERAL_RANKS_PEERS = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Contender:
    """A name, a program and where it puts its result; `result_path` None: on its stdout.

    The program runs as `ranks` processes, of which the first gives the result. `swap_folder` is
    removed afterwards: what is swapped there is as large as the model state.
    """

    name: str
    command: tuple[str, ...]
    result_path: Path | None
    log_path: Path
    swap_folder: Path | None = None
    ranks: int = 1


@dataclass(frozen=True)
class Outcome:
    """`status` is "finished", "missing" or "failed"; `figures` is empty unless finished.

    In `figures` are "sent_bytes_per_host", of the whole run; none without hosts.
    """

    name: str
    status: str
    figures: dict[str, Any]
    error: str | None = None


def hetero_contender(options: TrainOptions, policy: str, folder: Path, ranks: int = 1) -> Contender:
    """`hetero train` under `policy`; a host budget is for the policies that go to disk."""
    own = replace(
        options,
        policy=policy,
        host_memory=None if policy == "cpu" else options.host_memory,
        run_dir=str(folder / f"hetero-{policy}"),
        json=True,
        # One each: they would write the same file.
        timeline=options.timeline and _with_policy(options.timeline, policy),
    )
    command = (sys.executable, "-m", "hetero.cli", "train", *to_arguments(own))
    log_path = folder / f"hetero-{policy}.log"
    return Contender(f"hetero {policy}", command, None, log_path, ranks=ranks)


def _with_policy(path: str, policy: str) -> str:
    return str(Path(path).with_stem(f"{Path(path).stem}-{policy}"))


def require_ranks(peer: str, ranks: int) -> None:
    """Raises ValueError for a peer that cannot run as that many ranks."""
    if ranks > 1 and peer in ONE_RANK_PEERS:
        instead = " or ".join(SEVERAL_RANKS_PEERS)
        raise ValueError(f"--peers {peer} is one process, but --ranks is {ranks}; name {instead}")
    if ranks == 1 and peer in SEVERAL_RANKS_PEERS:
        instead = " or ".join(ONE_RANK_PEERS)
        raise ValueError(f"--peers {peer} needs --ranks 2 or more; for one rank name {instead}")


MODES = {
    "torch": ("bf16", "autocast"),
    "ddp": ("bf16", "autocast"),
    "fsdp2": ("offload",),
    "deepspeed": ("cpu", "nvme"),
}


def peer_contenders(
    peer: str,
    workload: Path,
    folder: Path,
    python: str,
    ranks: int = 1,
    dtype: str | None = None,
) -> list[Contender]:
    """The contenders that a name in --peers, one of PEERS, stands for.

    `python` is the interpreter that has DeepSpeed. With the `dtype` fp32 PyTorch's compute in that,
    too, else in bf16. Raises ValueError as require_ranks() does.
    """
    require_ranks(peer, ranks)
    deepspeed = peer == "deepspeed"
    program = (python if deepspeed else sys.executable, "-m", f"bench.peers.training.{peer}_train")
    swap_folder = folder / "deepspeed-swap" if deepspeed else None
    swap = () if swap_folder is None else (str(swap_folder),)
    found = []
    for mode in ("fp32",) if dtype == "fp32" and not deepspeed else MODES[peer]:
        path = folder / f"{peer}-{mode}.json"
        command = (*program, str(workload), str(path), mode, *swap)
        log_path = path.with_suffix(".log")
        found.append(Contender(f"{peer} {mode}", command, path, log_path, swap_folder, ranks))
    return found


def run_contender(
    contender: Contender,
    timeout_s: float,
    hosts: Hosts | None = None,
) -> Outcome:
    """Runs it to its end, its ranks on `hosts` if they are given; their logs have what they
    print."""
    own = {**import_environment(), "PATH": path_beside(contender.command[0])}
    environment = os.environ | own
    result_path = contender.result_path or contender.log_path.with_suffix(".out")
    stdout_path = result_path if contender.result_path is None else None
    sent_before = _sent_bytes(hosts)
    try:
        run_ranks(
            contender.command,
            contender.ranks,
            environment,
            contender.log_path,
            stdout_path,
            timeout_s,
            hosts,
        )
    except FileNotFoundError as error:
        return Outcome(contender.name, "failed", {}, f"cannot start {error.filename}")
    except RankError as error:
        if error.exit_code == EXIT_MISSING and contender.result_path is not None:
            why = last_line(rank_log(contender.log_path, 0, contender.ranks))
            return Outcome(contender.name, "missing", {}, f"{why}; install: {DEEPSPEED_INSTALL}")
        return Outcome(contender.name, "failed", {}, str(error))
    finally:
        if contender.swap_folder is not None:
            shutil.rmtree(contender.swap_folder, ignore_errors=True)
    figures = json.loads(result_path.read_text(encoding="utf-8"))
    if hosts is not None:
        sent = zip(sent_before, _sent_bytes(hosts), strict=True)
        figures["sent_bytes_per_host"] = [after - before for before, after in sent]
    return Outcome(contender.name, "finished", figures)


def _sent_bytes(hosts: Hosts | None) -> list[int]:
    return [] if hosts is None else [hosts.sent_bytes(host) for host in range(hosts.count)]
