"""bench.kernels.checksum: every implementation has its turn at every size; bad input."""

from __future__ import annotations

import json

import pytest

from bench.kernels import checksum as bench_checksum
from bench.kernels.checksum import main
from offload import _native


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_checksum, "TURN_BYTES", 10_000)


def test_every_contender_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sizes", "4KiB,1000", "--rounds", "2", "--json"]) == 0
    buffers = json.loads(capsys.readouterr().out)["buffers"]
    assert [buffer["nbytes"] for buffer in buffers] == [4096, 1000]
    own = [f"crc32c {name}" for name in _native.crc32c_implementations()]
    for buffer in buffers:
        assert list(buffer["gbps"]) == [*own, "memcpy", "zlib.crc32"]
        assert all(spread["min"] > 0 for spread in buffer["gbps"].values())


def test_a_turn_goes_through_the_buffer_as_often_as_makes_its_bytes() -> None:
    for nbytes, passes in ((4096, 3), (10_000, 1), (20_000, 1)):
        calls: list[int] = []
        bench_checksum._turn(lambda calls=calls: calls.append(1), nbytes)()
        assert len(calls) == passes


def test_the_table_has_a_column_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sizes", "4KiB,8KiB", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    for text in ("4.0 KiB", "8.0 KiB", "crc32c tables", "zlib.crc32"):
        assert text in shown


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--sizes", "much"], "--sizes: "),
        (["--sizes", ""], "--sizes must name one at least"),
        (["--sizes", "0"], "--sizes: a size must be positive"),
        (["--rounds", "0"], "--rounds must be 1 or more, got 0"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1
