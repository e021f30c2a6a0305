"""A Python that has imported torch, transformers and hetero when it starts.

Tests that start `hetero`, torchrun or a script as a process of its own give this program in the
place of `sys.executable` (the fixture `quick_python` of conftest.py). Its process asks the test's
to fork the server of processes.py, and hands over its arguments, environment, folder and files;
signals and the exit status are passed on. What measures memory, or how Python starts or ends, needs
a true one.

Workers of pytest-xdist are such processes, too, and so are their servers of processes.py: forks of
one that the controller has, which alone imports everything.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.ranks.processes import forked

_MOST_FILES = 100
_HIGH = 500  # above the numbers of files that programs have open
_CLIENT = """#!{python} -SE
import contextlib, json, os, signal, socket, sys
numbers = []
for number in map(int, os.listdir("/proc/self/fd")):
    with contextlib.suppress(OSError):  # it was that of the folder
        os.fstat(number)
        numbers.append(number)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
given = json.dumps([sys.argv, dict(os.environ), os.getcwd(), numbers]).encode()
socket.send_fds(server, [len(given).to_bytes(4, "big")], numbers)
server.sendall(given)
answers = server.makefile()
process = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(process, number))
status = int(answers.readline())
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextmanager
def quick_python() -> Iterator[Path]:
    """The program, while the context is open."""
    with tempfile.TemporaryDirectory(prefix="quick-") as folder:
        path = Path(folder) / "python"
        address = str(path.with_name("socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            path.write_text(_CLIENT.format(python=sys.executable, address=address))
            path.chmod(0o755)
            threading.Thread(target=_accept, args=(listener,), daemon=True).start()
            try:
                yield path
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # which ends _accept()


def _accept(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_run, args=(client,), daemon=True).start()


def _run(client: socket.socket) -> None:
    """Forks a process for a client, and tells how it ends; ends it with the client."""
    with client, contextlib.suppress(OSError):
        head, descriptors, *_ = socket.recv_fds(client, 4, _MOST_FILES)
        files = [Connection(descriptor) for descriptor in descriptors]
        given = client.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        process = forked(_become, files, given)
        for file in files:
            file.close()
        client.sendall(b"%d\n" % (process.pid or 0))
        if process.sentinel not in wait([process.sentinel, client]):
            process.kill()
        process.join()
        client.sendall(b"%d\n" % (process.exitcode or 0))


def _become(files: list[Any], given: bytes) -> None:
    """The program's process: what `python` with these arguments does."""
    (program, *arguments), environment, folder, numbers = json.loads(given)
    held = [fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH) for file in files]
    for file in files:
        file.close()
    for number, descriptor in zip(numbers, held, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering=1 if number == 2 else -1, closefd=False)
        for number, mode in enumerate(("r", "w", "w"))
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable = program
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        del arguments[0]  # of how Python starts
    option, *rest = arguments
    try:
        if option == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(rest[0], sys.modules["__main__"].__dict__)
        elif option == "-m":
            sys.argv = rest
            sys.path.insert(0, folder)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(option).parent))
            runpy.run_path(option, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
