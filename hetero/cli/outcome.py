"""How a command ends: its exit code, and one line for what went wrong."""

from __future__ import annotations

import os
import re
import sys
import traceback

EXIT_OK = 0
EXIT_FAILED = 1  # the run failed after it had begun
EXIT_USAGE = 2  # what was asked for cannot work
EXIT_INTERRUPTED = 130  # as the shell reports a program ended by Ctrl-C
EXIT_BROKEN_PIPE = 141  # likewise by SIGPIPE
EXIT_TERMINATED = 143  # likewise by SIGTERM


def print_error(command: str, error: Exception) -> None:
    """One line, so that a log shows it whole; its origin too if HETERO_DEBUG is set."""
    if os.environ.get("HETERO_DEBUG"):
        traceback.print_exception(error)
    # The number is for programs; the words follow it.
    text = re.sub(r"^\[Errno \d+\] ", "", " ".join(str(error).split()))
    print(f"hetero {command}: error: {text}", file=sys.stderr)
