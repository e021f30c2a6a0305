"""hetero's saves and loads of a training job, and its steps with and without a save beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import hetero
from bench.harness.rounds import Sample
from bench.peers.checkpoint_timing import drop_pages, files_bytes, steps_beside, timed
from bench.work.job_steps import JobSteps
from hetero.cli.job.job import Job


class HeteroCheckpoints:
    """Saves to one place, again and again, each save in place of the one before.

    Attributes:
        read_share: by "save" and "load", how much of the bytes that the last one moved between disk
            and memory were reads: of a save the state that is on NVMe, and then its files' bytes
            are writes; of a load the other way round.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self.read_share = {"save": 0.0, "load": 1.0}
        self._job = job
        self._steps = JobSteps(job)
        self._path = folder / "hetero"

    def warm_up(self) -> None:
        """Makes steps until those that follow are like those of a long training."""
        self._steps.warm_up()
        self._steps.wait_until_quiet()

    def save(self) -> Sample:
        """A save that training waits for: {"s", "gbps", "bytes", "read_bytes", "written_bytes",
        "above_bytes"}. "gbps" counts the checkpoint's bytes alone."""
        return self._moved("save", lambda: hetero.save(self._path, *self._state()))

    def load(self) -> Sample:
        """A load, until what it gives to NVMe is there; figures as save()."""
        drop_pages(self._path)

        def load() -> None:
            hetero.load(self._path, *self._state())
            self._job.engine.synchronize()

        return self._moved("load", load)

    def step(self, steps: int) -> Sample:
        """Steps without a save: {"step_s"}, as JobSteps.sample(), and "above_bytes"."""
        found: dict[str, float] = {}
        above = timed(lambda: found.update(self._steps.sample(steps)))["above_bytes"]
        return {"step_s": found["step_s"], "above_bytes": above}

    def beside(self) -> Sample:
        """Steps beside a save with blocking=False, after one that is not counted: steps_beside()'s
        figures."""

        def begin() -> Callable[[], object]:
            return hetero.save(self._path, *self._state(), blocking=False).wait

        self._steps.one()
        found = steps_beside(begin, self._steps.one)
        self._steps.wait_until_quiet()
        return found

    def _state(self) -> tuple[torch.nn.Module, hetero.HybridOptimizer]:
        return self._job.model, self._job.optimizer

    def _moved(self, what: str, body: Callable[[], object]) -> Sample:
        engine = self._job.engine
        before = engine.traffic
        figures = timed(body)
        after = engine.traffic
        self._steps.wait_until_quiet()
        nbytes = files_bytes(self._path)
        read = after.disk_read - before.disk_read + (nbytes if what == "load" else 0)
        written = after.disk_write - before.disk_write + (nbytes if what == "save" else 0)
        self.read_share[what] = read / (read + written)
        return {
            **figures,
            "gbps": nbytes / figures["s"] / 1e9,
            "bytes": nbytes,
            "read_bytes": read,
            "written_bytes": written,
        }
