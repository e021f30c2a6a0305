"""Ranks that are scripts: each is an interpreter that begins, trains and ends as a user's does.

(The ranks of processes.py outlive their calls, so they cannot show how a rank ends.) One server
imports everything and forks the ranks of each run, which saves the seconds that imports take.

An end takes three times as long as the rest of a rank, most of it in destructors of torch's
libraries. So ranks leave these out, and the modules of other packages, unless a test wants all.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from offload.interrupts import deliver_signals
from tests.support.waiting import PATIENCE_S

# Far less than the rank_timeout_s that such tests give, far more than an end takes.
SOON_S = PATIENCE_S
_LIBRARIES = ("torch", "transformers", "numpy", "sympy", "functorch", "networkx", "mpmath")


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

    def __init__(self, folder: Path, processes: Sequence[int]) -> None:
        self.place = Place(folder)
        self._processes = processes

    def heard(self, word: str) -> None:
        """Returns when a rank has said `word`; raises AssertionError if none does."""
        self._await(lambda: (self.place.folder / word).exists(), f"no rank came to {word}")

    def open(self, word: str) -> None:
        """Opens the gate at which ranks hold."""
        (self.place.folder / word).touch()

    def interrupt(self, rank: int) -> None:
        """Sends Ctrl-C to the rank."""
        os.kill(self._processes[rank], signal.SIGINT)

    def has_ended(self, rank: int) -> bool:
        return (self.place.folder / f"status-{rank}").exists()

    def end(self, rank: int) -> Ended:
        """How the rank ended; raises AssertionError if it does not end soon."""
        self._await(lambda: self.has_ended(rank), f"rank {rank} did not end")
        status = int((self.place.folder / f"status-{rank}").read_text())
        return Ended(status, self.errors(rank))

    def errors(self, rank: int) -> str:
        return (self.place.folder / f"errors-{rank}").read_text()

    def kill(self) -> None:
        """Ends ranks that a failed test has left."""
        for rank, process in enumerate(self._processes):
            if not self.has_ended(rank):
                os.kill(process, signal.SIGKILL)

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + SOON_S
        while not holds():
            if time.monotonic() > deadline_s:
                errors = [self.errors(rank) for rank in range(len(self._processes))]
                raise AssertionError("\n\n".join([what, *errors]))
            time.sleep(0.005)


class ScriptServer:
    """Starts runs, one after the other; a context."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="scripts-")
        self._runs = 0
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running: Script | None = None

    def __enter__(self) -> ScriptServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._running is not None:
            self._running.kill()
        self._server.communicate()
        self._folder.cleanup()

    def run(
        self, world: int, function: Callable[..., object], *args: Any, whole: bool = False
    ) -> Script:
        """Starts function(rank, place, *args) as the whole program of each of `world` ranks.

        `args` are what JSON can say. The environment is torchrun's; there is no process group yet,
        but a store for one (`init_method` in the environment's HETERO_TEST_STORE). With `whole`
        libraries have their ends, too.
        """
        if self._running is not None:
            self._running.kill()
        folder = Path(self._folder.name) / str(self._runs)
        folder.mkdir()
        self._runs += 1
        name = [function.__module__, function.__name__]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([str(folder), world, name, args, whole]) + "\n")
        self._server.stdin.flush()
        processes = json.loads(self._server.stdout.readline())
        self._running = Script(folder, processes)
        return self._running


def _serve() -> None:
    """Forks the ranks of each run that a line of stdin describes, and notes how they end."""
    for line in sys.stdin:
        folder, world, (module, name), args, whole = json.loads(line)
        function = getattr(import_module(module), name)
        processes = []
        for rank in range(world):
            process = os.fork()
            if process == 0:
                _become_rank(Path(folder), rank, world)
                if whole:
                    atexit.unregister(_leave_libraries)
                function(rank, Place(Path(folder)), *args)
                return  # the end of a script
            processes.append(process)
        print(json.dumps(processes), flush=True)
        for _ in range(world):
            process, status = os.wait()
            path = Path(folder) / f"status-{processes.index(process)}"
            path.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
            path.with_suffix(".new").rename(path)


def _become_rank(folder: Path, rank: int, world: int) -> None:
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


def _leave_libraries() -> None:
    """After all other functions of atexit: takes out what the interpreter and exit() would end."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _LIBRARIES:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]
    of_c = ctypes.CDLL(None)
    of_c.on_exit(ctypes.cast(of_c._exit, ctypes.c_void_p), None)  # (before those of libraries)


if __name__ == "__main__":
    atexit.register(_leave_libraries)  # first, so that it is called last
    for module in ("support.ranks.imported", "hetero.ranks.test_ending"):
        import_module(f"tests.{module}")
    gc.collect()
    gc.freeze()  # so that the end of a rank need not go through modules
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end this
    _serve()
