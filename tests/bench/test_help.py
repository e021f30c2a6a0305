"""Every benchmark that has options says which."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        *("adam", "bound", "checkpoint", "cuda", "durable", "io", "kernels.arrival"),
        *("kernels.checksum", "ladder", "predict", "step", "train"),
        *("activations.bound", "activations.large_batch", "activations.longest"),
    ],
)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        importlib.import_module(f"bench.{name}").main(["--help"])
    assert raised.value.code == 0
    assert f"python -m bench.{name}" in capsys.readouterr().out
