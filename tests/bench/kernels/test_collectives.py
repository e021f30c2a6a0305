"""python -m bench.kernels.collectives"""

from __future__ import annotations

import json

import pytest

from bench.kernels import collectives


def test_all_calls_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks; both ways that bytes can go."""
    arguments = ["--size", "1MiB", "--rounds", "1", "--repeats", "1", "--json"]
    assert collectives.main(arguments) == 0
    calls = json.loads(capsys.readouterr().out)["calls"]
    assert set(calls) >= {"hetero's gather", "hetero's mean, by gloo", "reduce_scatter_tensor"}
    assert all(call["s"] > 0 for call in calls.values())


@pytest.mark.parametrize("wrong", [["--ranks", "1"], ["--size", "1"]])
def test_bad_input_is_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert collectives.main(wrong) == 2
    assert capsys.readouterr().err.startswith("bench.kernels.collectives: error: ")
