"""The branches of a run: which of its checkpoints and commits it can go on from.

A run that goes back to an earlier checkpoint leaves later ones behind, with larger numbers. So
each checkpoint and commit says on which branch it was made, and the run folder which branch is the
run's now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hetero.job.ranks import Ranks

NAME = "lineage.json"  # in the run folder
KEY = "lineage"  # in `extra` of checkpoints and commits
_FIRST = "0"


@dataclass(frozen=True)
class Lineage:
    """The branches that led to where a run is.

    Attributes:
        branches: by age, name and the last step that counts; None of the last one, which goes on.
        source: the checkpoint that the last branch has begun from; "" of the first branch.
        launch: the launch of ranks that has begun it (this_launch()).
    """

    branches: tuple[tuple[str, int | None], ...] = ((_FIRST, None),)
    source: str = ""
    launch: str = ""

    def has(self, extra: Mapping[str, Any]) -> bool:
        """Whether what was saved with `extra` is on these branches, before they were left."""
        name = _branches_of(extra)[-1][0]
        last = dict(self.branches).get(name, -1)
        return last is None or int(extra["step"]) <= last

    def begun_from(self, extra: Mapping[str, Any], source: Path) -> Lineage:
        """A new branch of the checkpoint `source` with this `extra`."""
        *older, (name, _) = _branches_of(extra)
        new = os.urandom(4).hex()
        branches = (*older, (name, int(extra["step"])), (new, None))
        return Lineage(branches, str(source.resolve()), this_launch())

    def was_begun_by(self, source: Path) -> bool:
        """Whether this launch has gone back to the checkpoint before, and is started again."""
        return bool(self.launch) and (self.source, self.launch) == (
            str(source.resolve()),
            this_launch(),
        )

    @property
    def as_extra(self) -> dict[str, Any]:
        """For `extra` of a checkpoint."""
        return {KEY: [list(each) for each in self.branches]}

    @staticmethod
    def read(run_folder: Path) -> Lineage:
        """The run's; of a run that has never gone back its only branch. Raises ValueError."""
        path = run_folder / NAME
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            branches = tuple((str(name), last) for name, last in found["branches"])
            return Lineage(branches, str(found["source"]), str(found["launch"]))
        except (FileNotFoundError, NotADirectoryError):
            return Lineage()
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} says which checkpoints the run goes on from, and cannot be read: "
                f"{error!r}; give --resume a checkpoint"
            ) from None

    def write(self, run_folder: Path) -> None:
        """Replaces the run's. Raises OSError."""
        new = run_folder / f"{NAME}.new"
        with new.open("w", encoding="utf-8") as stream:
            json.dump(vars(self), stream)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(run_folder / NAME)


class Branch:
    """The branch that a run is on. The run folder is told of a new one before anything of it is
    kept."""

    def __init__(self, lineage: Lineage, run_folder: Path, ranks: Ranks) -> None:
        """`lineage` is the run's, before this start."""
        self.lineage = lineage
        self._run_folder = run_folder
        self._ranks = ranks
        self._is_new = False

    def go_on_from(self, extra: Mapping[str, Any], source: Path, goes_back: bool) -> None:
        """The run goes on from the checkpoint `source` with this `extra`; on a new branch if it
        `goes_back`, or has left the checkpoint's."""
        if goes_back or not self.lineage.has(extra):
            self.lineage = self.lineage.begun_from(extra, source)
            self._is_new = True

    def note(self) -> None:
        """Tells the run folder of a new branch. All ranks call it."""
        if self._is_new:
            self._is_new = False
            self.lineage = self._ranks.from_first(lambda: self.lineage)
            if self._ranks.leads:
                self.lineage.write(self._run_folder)


def _branches_of(extra: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Those of a checkpoint; before there were branches all was on the first one."""
    return [(name, last) for name, last in extra.get(KEY, [(_FIRST, None)])]


def this_launch() -> str:
    """What starts of ranks again by one torchrun have in common; "" without torchrun."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return ""
    agent = psutil.Process(os.getppid())
    return f"{run} {agent.pid} {agent.create_time()}"
