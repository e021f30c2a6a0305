"""The two files of a rank's commit records, which take turns."""

from __future__ import annotations

import os
from pathlib import Path

from hetero.state.memory.state_files import StateFiles
from offload.disk.durable import check_named, sync_path
from offload.errors import StoreError


class RecordFiles:
    """Files of this rank that commit records are written to, so that the last one stays whole."""

    def __init__(self, files: StateFiles) -> None:
        """Makes no file yet."""
        self._files = files
        self._open: dict[Path, int] = {}
        self.folder = Path(files.folders[0])

    def write(self, number: int, content: bytes | bytearray) -> None:
        """Returns when the record of commit `number` is durable; that before it is not touched.

        Raises StoreError.
        """
        path = self._files.record_path(number)
        try:
            is_new = path not in self._open
            if is_new:
                self._open[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            descriptor, done = self._open[path], 0
            while done < len(content):
                done += os.pwrite(descriptor, content[done:], done)
            os.fsync(descriptor)
            if is_new:
                for folder in self._files.folders:
                    sync_path(Path(folder))  # the data files' names, too
        except OSError as error:
            raise StoreError(
                error.errno, f"the commit's record cannot be written: {error.strerror}", str(path)
            ) from error
        check_named(descriptor, path)

    def close(self) -> None:
        """Closes the files; idempotent."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
