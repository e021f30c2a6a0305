"""A peer that lives in a process of its own and takes a sample when told to."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.machine import ROOT
from bench.harness.rounds import ContenderError
from bench.peers.serve import EXIT_MISSING

# Enough for every peer of it: those that train, that update and that move bytes.
DEEPSPEED_INSTALL = (
    "python -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers psutil numpy ninja"
    " setuptools deepspeed (and the system's libaio-dev), then --peer-python VENV/bin/python"
)


class PeerProcess:
    """A program that speaks the protocol of bench/peers/serve.py; started by the first sample.

    Close it after use (it is a context manager); it is idle, blocked on stdin, between samples.
    """

    def __init__(
        self,
        command: Sequence[str],
        setup: Mapping[str, Any],
        install: str,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 900.0,
    ) -> None:
        """`install` is told when a module is missing; `timeout_s` bounds each answer."""
        self.info: dict[str, Any] = {}
        self._command = tuple(command)
        self._setup = setup
        self._install = install
        self._environment = dict(environment or {})
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self._unread = b""

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sample(self, **request: Any) -> dict[str, float]:
        """What the peer measured. Raises ContenderError with the reason why it could not."""
        if self._process is None:
            self._start()
            self.info = self._ask(self._setup)
        return self._ask(request)

    def close(self) -> None:
        """Ends the process; idempotent."""
        if self._process is not None and self._process.stdin and self._process.stdout:
            try:
                self._process.stdin.close()  # its loop ends with its stdin
                self._process.wait(timeout=10)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
        self._log.close()

    def _start(self) -> None:
        environment = os.environ | {
            **import_environment(),
            "PATH": path_beside(self._command[0]),
        }
        try:
            self._process = subprocess.Popen(
                self._command,
                env=environment | self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
            )
        except OSError as error:
            raise ContenderError(f"cannot start {self._command[0]}: {error.strerror}") from error

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._died() from None
        answer = json.loads(self._read_line())
        if "error" in answer:
            raise ContenderError(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _read_line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + self._timeout_s
        while b"\n" not in self._unread:
            wait_s = deadline_s - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(wait_s, 0))
            if not ready:
                self._process.kill()
                raise ContenderError(f"no answer within {self._timeout_s:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._died()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self) -> ContenderError:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "it printed nothing")
        if code == EXIT_MISSING:
            return ContenderError(f"{last}; install: {self._install}")
        return ContenderError(f"exit code {code}: {last}")


def import_environment() -> dict[str, str]:
    """Lets a peer import bench, and hetero where it was built in place.

    A folder called `bench` where the user is must not come first; Python 3.10 looks there anyway.
    """
    inherited = os.environ.get("PYTHONPATH")
    path = str(ROOT) if not inherited else f"{ROOT}{os.pathsep}{inherited}"
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def path_beside(program: str) -> str:
    """Tools installed next to the interpreter first; DeepSpeed builds with ninja."""
    return f"{Path(program).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
