"""The two files of a rank's commit records, which have the same record, one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from hetero.durable.record import Record, StoredGroup, write
from hetero.state.memory.state_files import StateFiles
from offload.disk.durable import check_named, sync_path
from offload.errors import StoreError


class RecordFiles:
    """Files of this rank that commit records are written to, so that one is whole at any time."""

    def __init__(self, files: StateFiles) -> None:
        """Makes no file yet."""
        self._files = files
        self._open: dict[Path, int] = {}
        self.folder = Path(files.folders[0])

    def write(
        self, copy: int, record: Record, checksums: Callable[[StoredGroup], Iterable[bytes]]
    ) -> None:
        """Returns when a copy of the record is durable; the other copy is not touched.

        Raises StoreError.
        """
        path = self._files.record_path(copy)
        try:
            is_new = path not in self._open
            if is_new:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                self._open[path] = os.open(path, flags, 0o600)
            write(record, checksums, self._open[path])
            if is_new:
                for folder in self._files.folders:
                    sync_path(Path(folder))  # the data files' names, too
        except OSError as error:
            raise StoreError(
                error.errno, f"the commit's record cannot be written: {error.strerror}", str(path)
            ) from error
        check_named(self._open[path], path)

    def close(self) -> None:
        """Closes the files; idempotent."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
