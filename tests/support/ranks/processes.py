"""Several ranks on this machine: processes in a gloo group that run one function.

A *call* is one function run on every rank, in a process group of its own. The processes outlive
calls; after a failed call they are replaced, because nobody knows what state they are in. All are
forks of one server that has nothing but imported what tests need, which takes seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.harness.ranks import free_port

_TIMEOUT_S = 120.0
_GRACE_S = 0.5  # after a failure, for the other ranks to say what they met
_DUMP_S = 0.5  # for a rank to write all of where it is

# What the server imports, while it has a single thread; what is missing here a rank imports itself.
_IMPORTED = [
    "tests.support.ranks.imported",
    "transformers.models.gpt2.modeling_gpt2",
    "tests.support.ranks.rank_training",
    "tests.support.ranks.loading",
    "tests.zoo.rank_loops",
    "tests.zoo.rank_runs",
]


class RankFailure(Exception):
    """A rank raised, died, or did not end in time; the message names it and shows where."""


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = _TIMEOUT_S
) -> list[Any]:
    """function(rank, world, *args) on `world` fresh processes; the results in the ranks' order.

    `function` must be importable by its module's name, and `args` and results must pickle (tensors
    do). On each rank the default process group is gloo's over loopback, the environment has what
    torchrun sets, and torch has one thread.

    Raises RankFailure with the traceback of the rank that failed first, or, after `timeout_s`, with
    the stacks of those that still run. No process is left.
    """
    with RankPool(world) as pool:
        return pool.run(function, *args, timeout_s=timeout_s)


def run_forked(function: Callable[..., Any], *args: Any, timeout_s: float = _TIMEOUT_S) -> Any:
    """function(*args) on a process that has imported much, and done nothing: no rank.

    Raises what the function raises, RuntimeError if the process ends without a word, and
    TimeoutError. (An executor's queues have semaphores, which outlive a worker that is ended.)
    """
    ours, theirs = _context().Pipe(duplex=False)
    process = forked(_tell, theirs, function, args)
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise TimeoutError(f"{function.__name__}() took more than {timeout_s:g} s")
        found, failure, stack = pickle.loads(ours.recv_bytes())
    except EOFError:
        process.join()
        status = process.exitcode
        raise RuntimeError(f"the process of {function.__name__}() ended: {status}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if failure is not None:
        raise failure from RuntimeError(f"in the process:\n{stack}")
    return found


def _tell(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Sends what the function returns, or what it raises with its stack."""
    try:
        told = pickle.dumps((function(*args), None, ""))
    except BaseException as error:
        told = pickle.dumps((None, error, traceback.format_exc()))
    connection.send_bytes(told)


def forked(function: Callable[..., Any], *args: Any) -> ForkServerProcess:
    """Such a process that has begun with function(*args)."""
    process = _context().Process(target=_begin, args=(function, *args))
    process.start()
    return process


def _begin(function: Callable[..., Any], *args: Any) -> None:
    """function(*args) in a new process, whose own ones are started as Python does.

    As this one was started, locks between processes would have names, which outlive a process that
    is killed: tqdm makes one for each bar.
    """
    multiprocessing.set_start_method(None, force=True)
    function(*args)


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


@dataclass
class _Rank:
    process: ForkServerProcess
    connection: Connection
    stacks: Path  # where it writes its threads' stacks when it is asked to


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: its result, or how it failed."""

    result: Any = None
    failure: str | None = None


class Processes:
    """Ranks that have been started, the first ones; pools of several sizes may share them."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._folder: Path | None = None
        self._calls = 0

    def first(self, count: int) -> list[_Rank]:
        """Starts those that are missing."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = _context()
        for rank in range(len(self._ranks), count):
            ours, theirs = context.Pipe()
            stacks = self._folder / f"stacks-{rank}"
            given = (_serve, rank, theirs, stacks)
            process = context.Process(target=_begin, args=given, daemon=True)
            process.start()
            # Only the child has its end now, so that its death is an end of file here.
            theirs.close()
            self._ranks.append(_Rank(process, ours, stacks))
        return self._ranks[:count]

    def new_store(self) -> str:
        """The path of a file for the store of a call's process group."""
        self._calls += 1
        return f"{self._folder}/store-{self._calls}"

    def close(self) -> None:
        """Ends all, whatever they do. Idempotent; first() starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.connection.close()
        self._ranks.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class RankPool:
    """`world` processes, started by the first run() and kept until close()."""

    def __init__(self, world: int, processes: Processes | None = None) -> None:
        """`processes`: those that other pools use, too, one at a time; the first ones of them."""
        self.world = world
        self._processes = Processes() if processes is None else processes
        self._ranks: list[_Rank] = []  # of the call that is under way

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = _TIMEOUT_S
    ) -> list[Any]:
        """One call, as run_ranks() describes it. After a failure the next run() starts anew."""
        outcomes = self._outcomes(function, args, timeout_s, _GRACE_S)
        return [outcome.result for outcome in outcomes]

    def run_to_the_end(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = _TIMEOUT_S
    ) -> list[Outcome]:
        """One call, of which a rank's failure is an outcome, and the others go on until their own.

        Raises RankFailure for ranks that still run after `timeout_s`.
        """
        outcomes = self._outcomes(function, args, timeout_s, None)
        if any(outcome.failure is not None for outcome in outcomes):
            self.close()
        return outcomes

    def _outcomes(
        self, function: Callable[..., Any], args: Any, timeout_s: float, grace_s: float | None
    ) -> list[Outcome]:
        work = pickle.dumps((function, args))
        self._ranks = self._processes.first(self.world)
        try:
            return self._call(work, timeout_s, grace_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes, whatever they do. Idempotent; run() starts new ones."""
        self._processes.close()

    def _call(self, work: bytes, timeout_s: float, grace_s: float | None) -> list[Outcome]:
        store = self._processes.new_store()
        request = pickle.dumps((self.world, store, free_port(), timeout_s, work))
        # A rank that died meanwhile takes no request; its end is found when answers are awaited.
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.connection.send_bytes(request)
        outcomes = self._await_all(timeout_s, grace_s)
        # The groups end together: a connection that is closed early fails a collective elsewhere.
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # only of one whose failure is an outcome
                rank.connection.send_bytes(b"end")
        return outcomes

    def _await_all(self, timeout_s: float, grace_s: float | None) -> list[Outcome]:
        """`grace_s`: how long others may go on after a failure, which is then raised; None: to
        their end, and nothing is raised."""
        numbers = {rank.connection: number for number, rank in enumerate(self._ranks)}
        outcomes: dict[int, Outcome] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout_s
        while numbers:
            ready = wait(list(numbers), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                number = numbers.pop(connection)
                succeeded, answer = self._answer_of(number)
                if succeeded:
                    outcomes[number] = Outcome(pickle.loads(answer))
                elif grace_s is None:
                    outcomes[number] = Outcome(failure=answer.decode())
                else:
                    failures.append(f"rank {number} of {self.world} {answer.decode()}")
            if failures and grace_s is not None:
                deadline = min(deadline, time.monotonic() + grace_s)
        if failures:
            raise RankFailure("\n\n".join(failures))
        if numbers:
            running = sorted(numbers.values())
            names = ", ".join(map(str, running))
            where = "\n".join(f"rank {n}:\n{self._stacks_of(n)}" for n in running)
            raise RankFailure(
                f"of {self.world} ranks these were still running after {timeout_s:g} s: "
                f"{names}\n{where}"
            )
        return [outcomes[number] for number in range(self.world)]

    def _answer_of(self, number: int) -> tuple[bool, bytes]:
        """Whether the rank succeeded, and its result or what became of it."""
        rank = self._ranks[number]
        try:
            answer = rank.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            rank.process.join()
            return False, f"died with exit code {rank.process.exitcode}".encode()
        return answer[:1] == b"+", answer[1:]

    def _stacks_of(self, number: int) -> str:
        rank = self._ranks[number]
        assert rank.process.pid is not None
        if not rank.stacks.exists():
            return "(still starting)"
        os.kill(rank.process.pid, signal.SIGUSR1)
        # It writes in its own time, all of its threads, the one that hangs last.
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s and not rank.stacks.read_text():
            time.sleep(0.01)
        time.sleep(_DUMP_S)
        return rank.stacks.read_text()


def _serve(rank: int, connection: Connection, stacks: Path) -> None:
    """A rank's process: calls, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends us
    # The same environment as under torchrun; gloo would else look for the host's name.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )
    torch.set_num_threads(1)
    gc.freeze()
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            while True:
                request = connection.recv_bytes()
                connection.send_bytes(_answer(rank, request))
                connection.recv_bytes()  # all ranks have answered
                if dist.is_initialized():
                    dist.destroy_process_group()
                gc.collect()
                gc.freeze()  # so that the next collection need not go through modules


def _answer(rank: int, request: bytes) -> bytes:
    """The call's pickled result behind a "+", or what it raised behind a "-"."""
    try:
        world, store, port, timeout_s, work = pickle.loads(request)
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
        os.environ.update(MASTER_PORT=str(port), **sizes)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        function, args = pickle.loads(work)
        return b"+" + pickle.dumps(function(rank, world, *args))
    except BaseException:
        # The group stays: if it went, others would fail too, and hide what happened first.
        return b"-failed:\n" + traceback.format_exc().encode()
