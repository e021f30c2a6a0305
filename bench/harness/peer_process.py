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

from bench.harness.ranks import import_environment, last_line
from bench.harness.rounds import ContenderError, MissingError
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
        install: str = DEEPSPEED_INSTALL,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 900.0,
    ) -> None:
        """`install` is told when a module is missing; `timeout_s` bounds each answer."""
        self.info: dict[str, Any] = {}
        self._command, self._setup, self._install = tuple(command), setup, install
        self._environment = {**import_environment(command[0]), **(environment or {})}
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed by close())
        self._unread = b""

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sample(self, **request: Any) -> dict[str, float]:
        """What the peer measured. Raises ContenderError with the reason why it could not."""
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    bufsize=0,
                )
            except OSError as error:
                why = f"cannot start {self._command[0]}: {error.strerror}"
                raise ContenderError(why) from error
            self.info = self._ask(self._process, self._setup)
        return self._ask(self._process, request)

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

    def _ask(self, process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._died(process) from None
        answer = json.loads(self._read_line(process))
        if "error" in answer:
            raise ContenderError(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        deadline_s = time.monotonic() + self._timeout_s
        while b"\n" not in self._unread:
            wait_s = deadline_s - time.monotonic()
            if not select.select([process.stdout], [], [], max(wait_s, 0))[0]:
                process.kill()
                raise ContenderError(f"no answer within {self._timeout_s:.0f} s")
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._died(process)
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self, process: subprocess.Popen[bytes]) -> ContenderError:
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        last = last_line(Path(self._log.name))
        if code == EXIT_MISSING:
            return MissingError(f"{last}; install: {self._install}")
        return ContenderError(f"exit code {code}: {last}")
