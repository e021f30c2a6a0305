"""How a command ends: its exit code, and one line for what went wrong."""

from __future__ import annotations

import os
import sys
import traceback

EXIT_OK = 0
EXIT_FAILED = 1  # the run failed after it had begun
EXIT_USAGE = 2  # what was asked for cannot work
EXIT_INTERRUPTED = 130  # as the shell reports a program ended by Ctrl-C
EXIT_TERMINATED = 143  # likewise by SIGTERM

# What the extras of the commands bring.
EXTRAS = {"matplotlib": "train", "rich": "train", "transformers": "train", "peft": "finetune"}


def print_error(command: str, error: Exception) -> None:
    """One line, so that a log shows it whole; its origin too if HETERO_DEBUG is set."""
    if os.environ.get("HETERO_DEBUG"):
        traceback.print_exception(error)
    print(f"hetero {command}: error: {' '.join(str(error).split())}", file=sys.stderr)


def missing_extra(error: ModuleNotFoundError) -> ValueError | None:
    """What to say of a module that could not be imported; None if no extra has it."""
    missing = (error.name or "").partition(".")[0]
    if missing not in EXTRAS:
        return None
    return ValueError(f"{missing} is missing; install it: pip install 'hetero[{EXTRAS[missing]}]'")
