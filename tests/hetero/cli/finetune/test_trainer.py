"""hetero/cli/finetune/trainer: SIGTERM, at any time and on one rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.job.ranks import Ranks
from hetero.job.run import Observer, TrainingRun
from tests.support.late import late

trainer = late("hetero.cli.finetune.trainer")


def test_sigterm_while_ranks_agree_ends_the_next_step(tmp_path: Path) -> None:
    """It is not lost, and no rank ends alone."""
    pytest.importorskip("trl", reason="pip install 'hetero[finetune]'")

    class SignalledRanks(Ranks):
        def numbers(self, value: float) -> list[float]:
            run.note_sigterm()
            return [value]

    options: Any = SimpleNamespace(resume=None, commit_every=None, keeps_state=True)
    folder: Any = SimpleNamespace(path=tmp_path)
    run = TrainingRun(options, folder, Observer(), SignalledRanks())
    nothing: Any = None
    callback = trainer.RunCallback(nothing, run, nothing, [])
    for ends in (False, True):
        control = trainer.transformers.TrainerControl()
        callback.on_step_end(None, None, control)
        assert control.should_training_stop is control.should_save is run.terminated is ends
