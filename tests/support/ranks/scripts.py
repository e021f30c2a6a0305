"""Ranks that are scripts: each is an interpreter that begins, trains and ends as a user's does.

(The ranks of processes.py outlive their calls, and end as processes of multiprocessing, so they
cannot show how a rank ends.)

An end takes three times as long as the rest of a rank, most of it in destructors of torch's
libraries. So ranks leave these out, and the modules of other packages, unless a test wants all.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from offload.interrupts import deliver_signals
from tests.support.ranks.processes import forked
from tests.support.waiting import PATIENCE_S, in_time

# Far less than the rank_timeout_s that such tests give, far more than an end takes.
SOON_S = PATIENCE_S
_LIBRARIES = ("torch", "transformers", "numpy", "sympy", "functorch", "networkx", "mpmath")
INTERRUPTED = 128 + signal.SIGINT  # the status of a rank that Ctrl-C has ended, as a shell says it


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit status (negative: the signal), and what it wrote to stderr."""

    status: int
    errors: str


class Place:
    """Where ranks of a run hold, and say that they have come; its files are in one directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def say(self, word: str) -> None:
        """Tells the test that this rank has come to what `word` names."""
        (self.folder / word).touch()

    def hold(self, word: str) -> None:
        """Until the test opens the gate `word`, or a signal ends it, as a wait for a rank."""
        while not (self.folder / word).exists():
            deliver_signals()
            time.sleep(0.005)


class Script:
    """Ranks that run; the test interrupts them and sees how they end."""

    def __init__(self, folder: Path, processes: Sequence[ForkServerProcess]) -> None:
        self.place = Place(folder)
        self._processes = processes

    def heard(self, word: str) -> None:
        """Returns when a rank has said `word`; raises AssertionError if none does."""
        self._check(in_time((self.place.folder / word).exists, True), f"no rank came to {word}")

    def open(self, word: str) -> None:
        """Opens the gate at which ranks hold."""
        (self.place.folder / word).touch()

    def interrupt(self, rank: int) -> None:
        """Sends Ctrl-C to the rank."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)

    def has_ended(self, rank: int) -> bool:
        return self._processes[rank].exitcode is not None

    def end(self, rank: int) -> Ended:
        """How the rank ended; raises AssertionError if it does not end soon."""
        self._processes[rank].join(SOON_S)
        status = self._processes[rank].exitcode
        self._check(status is not None, f"rank {rank} did not end")
        return Ended(int(status or 0), self.errors(rank))

    def errors(self, rank: int) -> str:
        return (self.place.folder / f"errors-{rank}").read_text()

    def _check(self, holds: bool, what: str) -> None:
        assert holds, "\n\n".join([what, *map(self.errors, range(len(self._processes)))])

    def kill(self) -> None:
        """Ends ranks that a failed test has left."""
        for process in self._processes:
            process.kill()
            process.join()


class Scripts:
    """Starts runs, one after the other; a context."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="scripts-")
        self._runs: list[Script] = []

    def __enter__(self) -> Scripts:
        return self

    def __exit__(self, *error: object) -> None:
        for script in self._runs[-1:]:
            script.kill()
        self._folder.cleanup()

    def run(
        self, world: int, function: Callable[..., object], *args: Any, whole: bool = False
    ) -> Script:
        """Starts function(rank, place, *args) as the whole program of each of `world` ranks.

        The environment is torchrun's; there is no process group yet, but a store for one
        (`init_method` in the environment's HETERO_TEST_STORE). With `whole` libraries have their
        ends, too.
        """
        for script in self._runs[-1:]:
            script.kill()
        folder = Path(self._folder.name) / str(len(self._runs))
        folder.mkdir()
        given = [(folder, rank, world, whole, function, args) for rank in range(world)]
        self._runs.append(Script(folder, [forked(_be_rank, *each) for each in given]))
        return self._runs[-1]


def _be_rank(
    folder: Path,
    rank: int,
    world: int,
    whole: bool,
    function: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
        HETERO_TEST_STORE=f"file://{folder}/store",
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    gc.freeze()  # so that the end of a rank need not go through modules
    status = 0
    try:
        function(rank, Place(folder), *args)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:
        # What the last error's frames have stays until the interpreter ends.
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(type(error), error, error.__traceback__)
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    # The end of a script, which a process of multiprocessing never comes to.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not whole:
        _leave_libraries()
    ctypes.pythonapi.Py_Exit(status)


def _leave_libraries() -> None:
    """Takes out what the interpreter and exit() would end."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _LIBRARIES:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]
    of_c = ctypes.CDLL(None)
    of_c.on_exit(ctypes.cast(of_c._exit, ctypes.c_void_p), None)  # (before those of libraries)
