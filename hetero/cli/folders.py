"""Folders that a command is going to write to."""

from __future__ import annotations

import tempfile
from pathlib import Path


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
