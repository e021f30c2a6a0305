"""The run folder: what is written of one run."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from hetero.job.ranks import ALONE, Ranks
from offload.disk.descriptors import not_in_children
from offload.disk.new_folder import owns

CONFIG_NAME = "config.json"
METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"
MODEL_NAME = "model"
CHECKPOINTS_NAME = "checkpoints"
_PATIENCE_S = 10.0  # until a process that was killed a moment ago has let go of the lock


class RunFolder:
    """Created on entry, and locked; on exit it disappears again, with the parents it made, if no
    step ran.

    Of several ranks the first creates and writes it; on the others it has the same path, and what
    they would put into it goes nowhere.
    """

    def __init__(self, path: str | None, ranks: Ranks = ALONE, resumes: bool = False) -> None:
        """`resumes`: there may be a run in it, which goes on."""
        self.path = Path(path) if path is not None else _unused(Path("runs"))
        self._is_named = path is not None
        self._resumes = resumes
        self._ranks = ranks
        self._created: list[Path] = []
        self._lock = -1
        self._steps = 0

    def __enter__(self) -> RunFolder:
        """Raises ValueError, on all ranks, if the folder cannot be made, another process trains in
        it, or it already holds a run."""
        self.path = Path(self._ranks.from_first(self._create))
        return self

    def _create(self) -> str:
        until = time.monotonic() + _PATIENCE_S
        while not self._take():
            if not self._is_named:  # another run began in the same second
                self.path = _unused(self.path.parent)
                continue
            if time.monotonic() > until:
                raise ValueError(
                    f"another process trains in --run-dir {self.path} now; wait for its end, or "
                    f"name another folder"
                )
            time.sleep(0.05)
        return str(self.path)

    def _take(self) -> bool:
        """Makes the folder; whether this process has its lock now. Raises ValueError."""
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                self._created.append(folder)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            locked = owns(self._lock, self.path)
            has_run = self.has_run(self.path)
        except OSError as error:
            self._leave()
            raise ValueError(f"cannot make --run-dir {self.path}: {error.strerror}") from error
        if has_run and not self._resumes:
            self._leave()
            raise ValueError(f"--run-dir {self.path} already holds a run; name another folder")
        if locked:
            not_in_children.add(self)
        else:  # what was made is for who has the lock
            self._created.clear()
            self.close()
        return locked

    def __exit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._steps == 0:
            self._remove_created()
        self.close()

    def close(self) -> None:
        """Lets go of the lock; idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def require_shared(self, why: str) -> None:
        """Raises ValueError, on all ranks, unless all see the folder that the first one has made.

        `why` says what needs that.
        """
        if self._ranks.count == 1:
            return
        sign = self.path / self._ranks.from_first(self._make_sign)
        name = f"rank {self._ranks.rank} on {os.uname().nodename}"
        found = self._ranks.gather((name, sign.exists()))
        if self._ranks.leads:
            sign.unlink()
        blind = [name for name, sees in found if not sees]
        if blind:
            raise ValueError(
                f"{blind[0]} does not see --run-dir {self.path} of {found[0][0]}; {why} "
                f"needs a folder on a filesystem that all machines share"
            )

    def _make_sign(self) -> str:
        try:
            descriptor, path = tempfile.mkstemp(dir=self.path)
            os.close(descriptor)
        except OSError as error:
            raise ValueError(f"cannot write to --run-dir {self.path}: {error.strerror}") from error
        return Path(path).name

    @staticmethod
    def has_run(path: Path) -> bool:
        """Whether a run has written its metrics to the folder."""
        return (path / METRICS_NAME).is_file()

    @staticmethod
    def written_s(path: Path) -> float:
        """When the run that is in the folder was last written to."""
        return (path / METRICS_NAME).stat().st_mtime

    @staticmethod
    def run_id(path: Path) -> str | None:
        """What tells the run in the folder from all others, as its newest step says; None without
        one, or of an earlier hetero."""
        metrics = path / METRICS_NAME
        steps = [made for _, made in _lines(metrics)] if metrics.is_file() else []
        return steps[-1].get("run_id") if steps else None

    def go_on_after(self, step: int) -> None:
        """Forgets the lines of later steps, which are made again, and how the run ended before."""
        metrics = self.path / METRICS_NAME
        if not (self._ranks.leads and metrics.is_file()):
            return
        (self.path / SUMMARY_NAME).unlink(missing_ok=True)
        kept = [line for line, made in _lines(metrics) if made["step"] <= step]
        _replace(metrics, "".join(kept))

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Adds one step's line; it is in the file when this returns, whatever happens later."""
        if self._ranks.leads:
            with (self.path / METRICS_NAME).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(metrics) + "\n")
        self._steps += 1

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        if self._ranks.leads:
            _replace(self.path / name, json.dumps(content, indent=2) + "\n")

    def _remove_created(self) -> None:
        if self._created:
            (self.path / CONFIG_NAME).unlink(missing_ok=True)
        for folder in reversed(self._created):
            try:
                folder.rmdir()
            except OSError:
                # Somebody else put something there in the meantime: it is theirs now.
                break
        self._created.clear()


def _lines(metrics: Path) -> list[tuple[str, dict[str, Any]]]:
    """The lines of whole steps, and what they say: a crash may have cut the last one short."""
    found = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            made = json.loads(line)
            if isinstance(made, dict) and "step" in made:
                found.append((f"{line}\n", made))
    return found


def _replace(path: Path, text: str) -> None:
    """The file has the text, or what it had before; a full disk cuts neither short."""
    beside = path.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _unused(parent: Path) -> Path:
    """A folder name from the clock that nothing has yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, count = parent / stamp, 1
    while path.exists():
        count += 1
        path = parent / f"{stamp}-{count}"
    return path
