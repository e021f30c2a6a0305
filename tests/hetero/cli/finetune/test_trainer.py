"""hetero/cli/finetune/trainer: SIGTERM, at any time and on one rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl

from hetero.job.ranks import Ranks
from hetero.job.run import Observer, TrainingRun

pytest.importorskip("trl", reason="pip install 'hetero[finetune]'")

from hetero.cli.finetune.trainer import RunCallback


def test_sigterm_while_ranks_agree_ends_the_next_step(tmp_path: Path) -> None:
    """It is not lost, and no rank ends alone."""

    class SignalledRanks(Ranks):
        def gather(self, value: float) -> list[float]:
            run.note_sigterm()
            return [value]

    options: Any = SimpleNamespace(resume=None, commit_every=None, keeps_state=True)
    folder: Any = SimpleNamespace(path=tmp_path)
    run = TrainingRun(options, folder, Observer(), SignalledRanks())
    nothing: Any = None
    callback = RunCallback(nothing, run, nothing, [])
    for ends in (False, True):
        control = TrainerControl()
        callback.on_step_end(None, None, control)
        assert control.should_training_stop is control.should_save is run.terminated is ends
