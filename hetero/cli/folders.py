"""Folders that a command is going to write to."""

from __future__ import annotations

import tempfile
from pathlib import Path


def make_writable(folder: Path) -> None:
    """Makes the folder if it is not there, and sees that files can be made in it.

    Raises OSError if they cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
