"""Options: the command line and the dataclass say the same, and nonsense is refused."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from hetero.job.options import TrainOptions, add_train_arguments


def parse(*arguments: str, defaults: dict[str, object] | None = None) -> TrainOptions:
    parser = argparse.ArgumentParser()
    add_train_arguments(parser, defaults)
    return TrainOptions.from_namespace(parser.parse_args(arguments))


def test_defaults_can_be_replaced() -> None:
    assert parse(defaults={"steps": 7}).steps == 7
    assert parse("--max-steps", "9", defaults={"steps": 7}).steps == 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "--max-steps must be at least 1, got 0"),
        ({"seq_len": 1}, "--seq-len must be at least 2"),
        ({"batch_size": 0}, "--batch-size"),
        ({"accumulate": -1}, "--grad-accum"),
        ({"log_every": 0}, "--log-every"),
        ({"threads": 0}, "--threads"),
        ({"lr": float("nan")}, "--lr must be a finite number"),
        ({"lr": -1.0}, "--lr"),
        ({"clip": -1.0}, "--max-grad-norm"),
        ({"weight_decay": float("inf")}, "--weight-decay"),
        ({"warmup": -1}, "--warmup"),
        ({"seed": -1}, "--seed"),
        ({"recompute": "some"}, "--recompute must be one of auto, none, all"),
        ({"recompute": "all"}, "--recompute all is for what --activation-memory limits"),
        ({"run_dir": ""}, "--run-dir is given as an empty text"),
        ({"nvme_path": ("a", "")}, "--nvme-path is given as an empty text"),
        ({"schedule": "linear"}, "--schedule must be one of cosine, constant"),
        ({"model": "c.json", "vocab_size": 300}, "--vocab-size is for models by name"),
    ],
)
def test_nonsense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainOptions(**values)


def test_help_explains_every_option() -> None:
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    for action in parser._actions:
        assert action.help, action.option_strings
