"""bench.tiling: every contender is measured in a process of its own; bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.harness.rounds import ContenderError
from bench.tiling import __main__ as program
from bench.tiling.contenders import CONTENDERS, Sizes, measure
from bench.tiling.grads_in_forward import loss_with_grads


def test_a_turn_is_a_process(tmp_path: Path) -> None:
    # Large enough for its memory to grow past what importing had taken at its peak.
    sizes = Sizes(512, 300, 256, tiles=2, path=str(tmp_path))
    sample = program._turn("mlp", "plain", sizes)
    assert sample["seconds"] > 0
    assert sample["grown_bytes"] > 0
    with pytest.raises(ContenderError, match="KeyError: 'none'"):
        program._turn("mlp", "none", sizes)


def test_a_table_and_an_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = {"seconds": 2.0, "cpu_seconds": 3.0, "grown_bytes": 1e6, "host_memory_bytes": 5e6}
    monkeypatch.setattr(program, "_turn", lambda *_: turn)
    assert program.main(["--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["contenders"]
    assert list(found) == [
        f"{part}: {name}" for part, names in CONTENDERS.items() for name in names
    ]
    assert found["mlp: tiled"]["cpu_seconds_of_first"]["median"] == 1.0
    assert program.main(["--rounds", "1", "--parts", "linear"]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("linear", "2.00 (2.00-2.00)", "4.8 MiB"))


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, names in CONTENDERS.items() for name in names]
)
def test_every_contender_works(part: str, name: str, tmp_path: Path) -> None:
    sizes = Sizes(32, 4096, 64, tiles=4, path=str(tmp_path))
    found = measure(CONTENDERS[part][name], sizes)
    assert found["seconds"] > 0
    assert ("host_memory_bytes" in found) == (part == "linear")


@pytest.mark.parametrize("in_fp32", [False, True])
def test_gradients_in_forward_are_those_of_the_loss(in_fp32: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(40, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    labels = torch.randint(0, 50, (40,))
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels)
    found = loss_with_grads(hidden, weight, labels, 7, in_fp32)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found * 3, (hidden, weight)),
        torch.autograd.grad(expected * 3, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        program.main(["--help"])
    assert raised.value.code == 0
    assert "python -m bench.tiling" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--parts", "head"], "unknown name 'head' in --parts"),
        (["--tiles", "0"], "--tiles must be 1 or more"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(options) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1
