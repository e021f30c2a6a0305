"""How a command ends: its exit code, and one line for what went wrong or cannot work."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

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


# The extras that hetero is installed with, and what each brings: their versions are in
# pyproject.toml. A module has the name of its package, but for PyYAML's.
# Of several extras that bring a module, the first is the smallest.
EXTRAS = {
    "train": ("matplotlib", "pyyaml", "rich", "transformers"),
    "finetune": ("accelerate", "datasets", "peft", "pyarrow", "trl"),
}


def install_line(extra: str) -> str:
    """The command that brings an extra, as a shell takes it."""
    return f'pip install "hetero[{extra}]"'


def missing_extra(error: ModuleNotFoundError) -> ValueError | None:
    """What to say of a module that could not be imported; None if it is no extra's."""
    missing = (error.name or "").partition(".")[0]
    missing = {"yaml": "pyyaml"}.get(missing, missing)
    for extra, modules in EXTRAS.items():
        if missing in modules:
            return ValueError(f"{missing} is missing; install it: {install_line(extra)}")
    return None


def check_file(path: Path, option: str) -> None:
    """Raises ValueError, in words of the option, if the file could not be written; makes the folder
    that it is to be in."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file")
    make_writable(path.parent, f"{option} {path}")


def make_writable(folder: Path, asked: str) -> None:
    """Makes the folder if it is not there, and sees that files can be made in it.

    Raises ValueError if they cannot, in words of the option that `asked` for it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{asked} cannot be written: {error.strerror}; give another one that can"
        ) from error
