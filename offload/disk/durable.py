"""What is durable: on the disk, and not only in the system's memory."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Returns when a file's content, or the names in a folder, are durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
