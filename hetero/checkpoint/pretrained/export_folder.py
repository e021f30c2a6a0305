"""A folder that all ranks write together, beside its place, which it takes when it is whole."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.checkpoint.pretrained.stored_tensors import INDEX_NAME
from hetero.checkpoint.safetensors_header import read
from hetero.ranks.process_groups import ProcessGroups
from offload.disk.durable import sync_path
from offload.disk.new_folder import NewFolder
from offload.errors import CheckpointError, HeteroError, StoreError

# By this an earlier export is told from a folder that somebody else has made.
METADATA = {"format": "pt", "writer": "hetero"}
_SMALL_FILES = {"config.json", "generation_config.json", INDEX_NAME}
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
_SAME_CLASS: tuple[type[HeteroError], ...] = (CheckpointError, StoreError)


@dataclass(frozen=True)
class NewFile:
    """A file of the folder: its first bytes, and how many it will have."""

    head: bytes
    nbytes: int


class ExportFiles:
    """The files of an export, open for writing at any place; each rank has its own object."""

    def __init__(self, folder: Path, names: Mapping[str, NewFile]) -> None:
        """Opens all. Raises OSError."""
        self._files: dict[str, int] = {}
        try:
            for name in names:
                self._files[name] = os.open(folder / name, os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, offset: int, values: torch.Tensor) -> None:
        """Writes a tensor's bytes at byte `offset` of the file. Raises OSError."""
        dense = values.detach().to("cpu").contiguous()
        if not dense.numel():
            return
        # (Of one element torch calls any stride contiguous, and then refuses other views of it.)
        flat = dense.as_strided((dense.numel(),), (1,))
        memory = flat.view(torch.uint8).numpy().data
        done = 0
        while done < len(memory):
            done += os.pwrite(self._files[name], memory[done:], offset + done)

    def sync(self) -> None:
        """Returns when what was written is durable. Raises OSError."""
        for descriptor in self._files.values():
            os.fsync(descriptor)

    def close(self) -> None:
        """Idempotent."""
        while self._files:
            os.close(self._files.popitem()[1])


@contextmanager
def export_folder(
    path: Path,
    world: ProcessGroups,
    files: Mapping[str, NewFile],
    write_small_files: Callable[[Path], None],
) -> Iterator[ExportFiles]:
    """Makes the folder `path` of what is written inside the block. All ranks must enter it.

    They must see the same folder. Until all have written what is theirs, and it is durable, `path`
    is as it was. If one fails, or the block raises there, none of them leaves anything.

    Args:
        path: where the folder is to be; something there must be empty, or an earlier export.
        files: what is written inside the block, alike on all ranks.
        write_small_files: called with the folder on the first rank, where it writes what else
            belongs into it.

    Raises:
        ValueError: something else is at `path`.
        CheckpointError: a rank does not see the folder.
        StoreError: it cannot be written.
        HeteroError: another rank met one of these, or something that the block raised.
    """
    folder = NewFolder(os.path.realpath(path), "the export")
    path, new = folder.path, folder.incomplete
    first = world.everyone is None or world.everyone.rank == 0
    opened: list[ExportFiles] = []

    def make() -> None:
        if first:
            _make(folder, files, write_small_files)

    def open_files() -> None:
        folder.require_seen(world.name)
        opened.append(ExportFiles(new, files))

    def replace() -> None:
        if first:
            for name in os.listdir(new):
                sync_path(new / name)
            folder.complete()

    def together(what: str, do: Callable[[], None]) -> None:
        failure: Exception | None = None
        try:
            do()
        except Exception as error:
            failure = _explained(error, path)
        world.all_or_none(failure, f"{what} an export", _SAME_CLASS)

    try:
        together("make", make)
        together("open", open_files)
        failure: Exception | None = None
        try:
            yield opened[0]
            opened[0].sync()
        except Exception as error:
            failure = _explained(error, path)
        world.all_or_none(failure, "write an export", _SAME_CLASS)
        together("complete", replace)
    finally:
        for each in opened:
            each.close()
        folder.abandon()


def _explained(error: Exception, path: Path) -> Exception:
    """An OSError as the StoreError that it is here; another error as it is."""
    if isinstance(error, OSError) and not isinstance(error, HeteroError):
        text = f"cannot write the export {path}, which is as it was before: {error.strerror}"
        made = StoreError(error.errno, text, str(error.filename or path))
        made.__cause__ = error
        return made
    return error


def _make(
    folder: NewFolder, files: Mapping[str, NewFile], write_small_files: Callable[[Path], None]
) -> None:
    _refuse_other(folder.path)
    folder.begin()
    write_small_files(folder.incomplete)
    for name, file in files.items():
        with (folder.incomplete / name).open("xb", buffering=0) as stream:
            memory = memoryview(file.head)
            while memory:
                memory = memory[stream.write(memory) :]
            stream.truncate(file.nbytes)


def _refuse_other(path: Path) -> None:
    """Raises ValueError if something is at `path` that must not be replaced."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise ValueError(f"{path} is there already, and is no folder; name another one")
    found = sorted(path.iterdir())
    weights = [each for each in found if _WEIGHTS.fullmatch(each.name)]
    others = [each.name for each in found if each.name not in _SMALL_FILES and each not in weights]
    if others:
        raise ValueError(
            f"{path} has {others[0]!r}, which save_pretrained() did not write and would remove; "
            f"name another folder"
        )
    for each in weights:
        try:
            writer = read(each).metadata.get("writer")
        except (CheckpointError, OSError) as error:
            raise ValueError(f"{path} is no earlier export: {error}; name another one") from error
        if writer != METADATA["writer"]:
            raise ValueError(
                f"{each} was not written by save_pretrained() of hetero, which would remove it; "
                f"name another folder"
            )
    if found and not weights:
        raise ValueError(f"{path} has files and no weights; name another folder")
