"""What became of each test: the plugin of pytest that writes it down, and how it is told."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.peers_tests.peers import PEERS, Peer

PEER, RESULTS = "HETERO_PEER", "HETERO_PEER_RESULTS"  # the environment of a run

_RAISED = re.compile(
    r"^(?:E +)?((?:\w+\.)*\w*(?:Error|Exception|NotThere|Exit))(?:: ?(.*))?$", re.M
)
_FRAME = re.compile(r'^(?:E +)?(?: *File "([^"]+)", line \d+|([\w./-]+\.py):\d+: in )', re.M)
_NO_DEVICE = re.compile(r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver|no NCCL|nccl", re.I)


class Outcome(Enum):
    """What became of a test."""

    PASSED = "passed"
    REFUSED = "refused by name"  # hetero said that it has not what the test asks for
    FAILED = "failed"
    ABSENT = "needs what hetero has not"  # names of the project's insides, or a device
    SKIPPED = "skipped"


class Result(NamedTuple):
    """One test.

    Attributes:
        test: its name, as pytest has it.
        outcome: an Outcome's value.
        reason: the error's type and text, in one line.
    """

    test: str
    outcome: str
    reason: str = ""


def told(peer: Peer, text: str) -> tuple[Outcome, str]:
    """The outcome that a failure's text tells, and the error in one line.

    An error is a refusal if hetero has raised it on purpose: a ValueError, or an error of its own
    class, whose innermost frame is hetero's.
    """
    raised = list(_RAISED.finditer(text))
    if not raised:
        return Outcome.FAILED, " ".join(text.split())[-300:]
    # The last frame before the first of the errors that have the last one's type and text: ranks'
    # tracebacks come before the one of the process that waited for them.
    kind, said = raised[-1].groups("")
    first = next(m for m in raised if m.group(1).rpartition(".")[2] == kind.rpartition(".")[2])
    frames = [a or b for a, b in _FRAME.findall(text[: first.start()])]
    reason = f"{kind.rpartition('.')[2]}: {said}"[:400]
    if "NotThere" in kind or _NO_DEVICE.search(reason):
        return Outcome.ABSENT, reason
    if kind.endswith(("AttributeError", "ImportError")) and re.search(peer.internals, said):
        return Outcome.ABSENT, reason
    if kind.endswith("AssertionError") and not said:  # its line says what it asked for
        asked = text[: first.start()].rpartition("assert ")[2].partition("\n")[0]
        reason = f"{reason}assert {asked}"[:400]
        if re.search(peer.internals, asked):
            return Outcome.ABSENT, reason
    in_hetero = bool(frames) and bool(re.search(r"(^|/)(hetero|offload)/", frames[-1]))
    if in_hetero and (kind.endswith("ValueError") or "offload.errors" in kind):
        return Outcome.REFUSED, reason
    return Outcome.FAILED, reason


class _Recorder:
    """Writes one line of JSON for each test, at once: a run that is killed loses the last alone."""

    def __init__(self, peer: Peer, path: Path) -> None:
        self._peer, self._path = peer, path

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        outcome, reason, text = Outcome.PASSED, "", ""
        if report.skipped:
            outcome, reason = Outcome.SKIPPED, str(report.longrepr)[-200:]
        elif report.failed:
            text = str(report.longrepr)
            outcome, reason = told(self._peer, text)
        line = [*Result(report.nodeid, outcome.value, reason), text[-8000:]]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: Any) -> None:
    """Called by pytest, which has this module as its plugin."""
    peer = PEERS[os.environ[PEER]]
    # Ranks come from a server that has the heavy modules already.
    multiprocessing.set_forkserver_preload(["torch", "hetero", *peer.stand_ins])
    config.pluginmanager.register(_Recorder(peer, Path(os.environ[RESULTS])))
