"""hetero/cli/finetune/trainer: SIGTERM, at any time and on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl

from hetero.job.checkpoints import Branch, Lineage
from hetero.job.ranks import ALONE

pytest.importorskip("trl", reason="pip install 'hetero[finetune]'")

from hetero.cli.finetune.trainer import RunCallback


def test_sigterm_while_ranks_agree_ends_the_next_step(tmp_path: Path) -> None:
    """It is not lost, and no rank ends alone."""

    class Ranks:
        def gather(self, value: float) -> list[float]:
            callback.note_sigterm()
            return [value]

    parts: dict[str, Any] = {"ranks": Ranks(), "branch": Branch(Lineage(), tmp_path, ALONE)}
    others: dict[str, Any] = dict.fromkeys(("trainer", "options", "begin", "folder", "observer"))
    callback = RunCallback(**parts, **others)
    for ends in (False, True):
        control = TrainerControl()
        callback.on_step_end(None, None, control)
        assert control.should_training_stop is control.should_save is callback.terminated is ends
