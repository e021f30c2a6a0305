"""A peer as a process that waits to be told to take a sample.

Each request is one line of JSON on stdin and gets one line back: {"result": ...} or {"error": ...}.
The first request is the set-up. stdin's end is the end of the peer, so none outlives its parent.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, Protocol

# A module that is not installed is told apart from a failure by this exit code.
EXIT_MISSING = 3


class Peer(Protocol):
    """Something that can be measured again and again."""

    info: dict[str, Any]  # versions and settings, sent back after the set-up

    def sample(self, request: dict[str, Any]) -> dict[str, float]: ...


def serve(make: Callable[[dict[str, Any]], Peer]) -> int:
    """Runs until stdin ends. `make` gets the set-up; its ModuleNotFoundError means "missing"."""
    # Libraries print to stdout as they like; the answers go through a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer: Peer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if peer is None:
                peer = make(request)
                answer: dict[str, Any] = {"result": peer.info}
            else:
                answer = {"result": peer.sample(request)}
        except ModuleNotFoundError as error:
            print(error, file=sys.stderr)
            return EXIT_MISSING
        except Exception as error:  # any of them is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def process_cpu_s() -> float:
    """User and system time of this process, its kernel-side I/O workers included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
