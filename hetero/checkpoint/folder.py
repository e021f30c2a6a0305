"""The folder of a checkpoint, the latest one of several, and those that are kept."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from hetero.checkpoint.manifest import NAME
from offload.disk.new_folder import REMOVED, NewFolder, beside
from offload.errors import CheckpointError

# Of a checkpoint of a Trainer of Hugging Face: the file that is written last, and hetero's folder.
TRAINER_STATE_NAME = "trainer_state.json"
_IN_TRAINERS = "hetero"


def of_trainer(path: Path) -> Path:
    """hetero's part of a whole checkpoint of a Trainer; another folder itself."""
    try:
        return path / _IN_TRAINERS if (path / TRAINER_STATE_NAME).is_file() else path
    except (OSError, ValueError):  # (a name with a zero byte)
        return path


def is_checkpoint(path: Path) -> bool:
    """Whether the folder has a manifest, which is written last, and one may look into it."""
    try:
        return _has_manifest(path)
    except (OSError, ValueError):  # (a name with a zero byte)
        return False


def _has_manifest(path: Path) -> bool:
    """The same. Raises OSError where that cannot be known: nothing may be removed then."""
    try:
        return stat.S_ISREG(os.stat(path / NAME).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def find_checkpoint(path: Path) -> Path:
    """`path`, if it is a checkpoint, or hetero's part of it; else the latest one in that folder.

    Raises CheckpointError if there is none.
    """
    path = of_trainer(path)
    if is_checkpoint(path):
        return path
    replaced = beside(path, REMOVED) if path.name else path
    if not os.path.lexists(path) and is_checkpoint(replaced):
        return replaced  # the crash came between two renames
    found = latest_checkpoint(path)
    if found is not None:
        return found
    if not os.path.lexists(path):
        raise CheckpointError(f"there is no checkpoint {path}")
    what = "a folder without" if os.path.isdir(path) else "no folder with"
    raise CheckpointError(f"{path} is {what} a checkpoint's {NAME}, or with checkpoints in it")


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` with the largest numbers in its name; None if there is none.

    So "step-90" comes before "step-100". No clock has a say.
    """
    return next(iter(latest_checkpoints(folder)), None)


def latest_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """All checkpoints in `folder`, those with the largest numbers in their names first."""
    try:
        found = {each.name: each for each in Path(folder).iterdir()}
    except (OSError, ValueError):  # (a name with a zero byte)
        return []
    names = {}
    for name, each in found.items():
        own, _, what = name[1:].rpartition(".")
        if not name.startswith("."):
            names[name] = of_trainer(each)
        elif own and what == REMOVED and own not in found:  # the crash came between two renames
            names[own] = each
    whole = [name for name, each in names.items() if is_checkpoint(each)]
    whole.sort(key=lambda name: (_numbers(name), name), reverse=True)
    return [names[name] for name in whole]


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _family(name: str) -> str:
    """What names have in common that differ in their numbers alone."""
    return re.sub(r"\d+", "0", name)


class CheckpointFolder(NewFolder):
    """A checkpoint that is being saved. It is whole if it has its manifest, which comes last."""

    def __init__(self, path: str | os.PathLike[str], keep: int | None = None) -> None:
        """Nothing is made yet.

        Args:
            path: its place.
            keep: of the checkpoints whose names differ from this one's in their numbers alone, this
                one and those with the largest numbers stay, so many in all. Default: all.
        """
        super().__init__(path)
        self._keep = keep

    def is_whole(self, folder: Path) -> bool:
        """See NewFolder."""
        return _has_manifest(folder)

    def is_related(self, name: str) -> bool:
        """Also of names that differ from this one in their numbers alone."""
        return _family(name) == _family(self.path.name)

    def remove(self, folder: Path) -> None:
        """Without a manifest it is no checkpoint any more, whatever comes next."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (folder / NAME).unlink()
        super().remove(folder)

    def refuse_other(self) -> None:
        """See NewFolder."""
        if self.path.exists() and not self.is_empty and not _has_manifest(self.path):
            raise ValueError(
                f"{self.path} is there already, and is no checkpoint; choose another path"
            )

    def complete(self) -> None:
        """See NewFolder; then those go that are not kept."""
        super().complete()
        if self._keep is not None:
            self._remove_others(self._keep)

    def _remove_others(self, count: int) -> None:
        family = _family(self.path.name)
        with self.as_store_error("look for earlier checkpoints"):
            found = list(self.path.parent.iterdir())
        others = [
            each
            for each in found
            if each != self.path
            and _family(each.name) == family
            and is_checkpoint(each)
            and not each.is_symlink()
        ]
        others.sort(key=lambda each: _numbers(each.name), reverse=True)
        for each in others[count - 1 :]:
            removed = beside(each, REMOVED)
            with contextlib.suppress(OSError):  # what cannot be removed stays
                os.rename(each, removed)
                self.remove(removed)
