"""bench/activations: all ways to train, with the same losses."""

from __future__ import annotations

import json

import pytest

from bench.activations.__main__ import main
from bench.activations.contender import CONTENDERS

TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--seq-len", "32", "--batch-size", "2"]


@pytest.mark.extra
def test_a_small_run(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, "--steps", "1", "--activation-memory", "48MiB", "--host-memory", "256MiB"]
    assert main([*arguments, "--path", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["results"]) == list(CONTENDERS)
    assert all(each["step_s"] > 0 for each in found["results"].values())


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--contenders", "torsh"]) == 2
    assert "unknown contender 'torsh'" in capsys.readouterr().err
