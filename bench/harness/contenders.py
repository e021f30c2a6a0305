"""Who is measured by bench.train: each contender is a program that gets the same workload."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness.hosts import Hosts
from bench.harness.peer_process import DEEPSPEED_INSTALL
from bench.harness.ranks import RankError, import_environment, last_line, rank_log, run_ranks
from bench.harness.rounds import ContenderError, MissingError
from bench.peers.serve import EXIT_MISSING
from hetero.job.options import TrainOptions, to_arguments

# The modes of bench/peers/train.py that a peer is measured in.
MODES = {
    "torch": ("bf16", "autocast"),
    "ddp": ("bf16", "autocast"),
    "fsdp2": ("offload",),
    "deepspeed": ("cpu", "nvme"),
}
PEERS = tuple(MODES)
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


def hetero_contender(options: TrainOptions, policy: str, folder: Path, ranks: int = 1) -> Contender:
    """`hetero train` under `policy`; a host budget is for the policies that go to disk."""
    timeline = options.timeline
    if timeline:  # one each: they would write the same file
        timeline = str(Path(timeline).with_stem(f"{Path(timeline).stem}-{policy}"))
    own = replace(
        options,
        policy=policy,
        host_memory=None if policy == "cpu" else options.host_memory,
        run_dir=str(folder / f"hetero-{policy}"),
        json=True,
        timeline=timeline,
    )
    command = (sys.executable, "-m", "hetero.cli", "train", *to_arguments(own))
    log_path = folder / f"hetero-{policy}.log"
    return Contender(f"hetero {policy}", command, None, log_path, ranks=ranks)


def peer_contenders(
    peer: str,
    workload: Path,
    folder: Path,
    python: str,
    ranks: int = 1,
    dtype: str | None = None,
) -> Iterator[Contender]:
    """The contenders that a name in --peers, one of PEERS, stands for.

    `python` is the interpreter that has DeepSpeed. With the `dtype` fp32 PyTorch's compute in that,
    too, else in bf16. Raises ValueError for a peer that cannot run as that many ranks.
    """
    if ranks > 1 and peer in ONE_RANK_PEERS:
        instead = " or ".join(SEVERAL_RANKS_PEERS)
        raise ValueError(f"--peers {peer} is one process, but --ranks is {ranks}; name {instead}")
    if ranks == 1 and peer in SEVERAL_RANKS_PEERS:
        instead = " or ".join(ONE_RANK_PEERS)
        raise ValueError(f"--peers {peer} needs --ranks 2 or more; for one rank name {instead}")
    deepspeed = peer == "deepspeed"
    program = (python if deepspeed else sys.executable, "-m", "bench.peers.train", peer)
    swap_folder = folder / "deepspeed-swap" if deepspeed else None
    swap = () if swap_folder is None else (str(swap_folder),)
    for mode in ("fp32",) if dtype == "fp32" and not deepspeed else MODES[peer]:
        path = folder / f"{peer}-{mode}.json"
        command = (*program, str(workload), str(path), mode, *swap)
        log_path = path.with_suffix(".log")
        yield Contender(f"{peer} {mode}", command, path, log_path, swap_folder, ranks)


def run_contender(
    contender: Contender, timeout_s: float, hosts: Hosts | None = None
) -> dict[str, Any]:
    """Runs it to its end, its ranks on `hosts` if they are given; their logs have what they print.

    Returns its figures, with hosts "sent_bytes_per_host" of the whole run, too. Raises
    ContenderError.
    """
    command, ranks, log_path = contender.command, contender.ranks, contender.log_path
    result_path = contender.result_path or log_path.with_suffix(".out")
    stdout_path = result_path if contender.result_path is None else None
    environment = import_environment(command[0])
    sent_before = _sent_bytes(hosts)
    try:
        run_ranks(command, ranks, environment, log_path, stdout_path, timeout_s, hosts)
    except FileNotFoundError as error:
        raise ContenderError(f"cannot start {error.filename}") from None
    except RankError as error:
        if error.exit_code == EXIT_MISSING and contender.result_path is not None:
            why = last_line(rank_log(log_path, 0, ranks))
            raise MissingError(f"{why}; install: {DEEPSPEED_INSTALL}") from None
        raise ContenderError(str(error)) from None
    finally:
        if contender.swap_folder is not None:
            shutil.rmtree(contender.swap_folder, ignore_errors=True)
    figures: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
    if hosts is not None:
        sent = zip(sent_before, _sent_bytes(hosts), strict=True)
        figures["sent_bytes_per_host"] = [after - before for before, after in sent]
    return figures


def _sent_bytes(hosts: Hosts | None) -> list[int]:
    return [] if hosts is None else [hosts.sent_bytes(host) for host in range(hosts.count)]
