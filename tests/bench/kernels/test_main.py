"""bench.kernels: every contender has its turn, figures are those of the same round, bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from bench.kernels import __main__ as program
from bench.kernels.__main__ import PAIRS, main
from bench.work.updates import TORCH_DTYPES, Updates
from offload import _native


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(program, "TURN_BYTES", 10_000)
    before = torch.get_num_threads(), _native.threads()
    yield
    torch.set_num_threads(before[0])
    _native.set_threads(before[1])


@pytest.mark.parametrize(("source_dtype", "dtype"), [("bf16", "bf16"), ("bf16", "fp32")])
def test_a_gradient_arrives_in_all_ways_alike(source_dtype: str, dtype: str) -> None:
    updates = Updates(5000, repeats=1)
    found: dict[str, list[torch.Tensor]] = {"copy": [], "add": []}
    for variant in updates.writes(source_dtype, dtype):
        variant.sample()
        kept = updates.tensor("grad", TORCH_DTYPES[dtype]).clone()
        found[variant.name.split()[0].rstrip(",")].append(kept)
    for kept in found.values():
        assert len(kept) == 3
        assert all(one.equal(kept[0]) for one in kept)
    assert not found["copy"][0].equal(found["add"][0])


def test_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--numel", "4096", "--rounds", "1", "--repeats", "1"]
    assert main([*arguments, "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert list(groups) == [f"{source} to {kept}" for source, kept in PAIRS]
    for figures in groups.values():
        seconds = {name: found["s"]["median"] for name, found in figures.items()}
        ratios = figures["add and sum"]
        assert ratios["of_plain"]["median"] == pytest.approx(
            seconds["add and sum"] / seconds["add"]
        )
        assert ratios["of_both"]["median"] == pytest.approx(
            seconds["add and sum"] / seconds["add, then sum"]
        )
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "/ call, then sum" in shown
    assert "bf16 to fp32" in shown


def test_checksums(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--of", "checksum", "--sizes", "4KiB,1000", "--rounds", "2", "--json"]
    assert main(arguments) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert list(groups) == ["4.0 KiB", "1000 B"]
    for figures in groups.values():
        assert list(figures) == ["crc32c", "crc32c by tables", "memcpy", "zlib.crc32"]
        assert all(found["gbps"]["min"] > 0 for found in figures.values())


def test_a_turn_goes_through_the_buffer_as_often_as_makes_its_bytes() -> None:
    for nbytes, passes in ((4096, 3), (10_000, 1), (20_000, 1)):
        calls: list[int] = []
        program._passes(lambda calls=calls: calls.append(1), nbytes)
        assert len(calls) == passes


def test_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks; both ways that bytes can go."""
    sizes = ["--size", "1MiB", "--rounds", "1", "--repeats", "1"]
    assert main(["--of", "collectives", *sizes, "--json"]) == 0
    ((name, calls),) = json.loads(capsys.readouterr().out)["groups"].items()
    assert name == "1.0 MiB, 2 ranks"
    assert set(calls) >= {"hetero's gather", "hetero's mean, by gloo", "reduce_scatter_tensor"}
    assert all(call["s"]["median"] > 0 for call in calls.values())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--of", "sums"], "unknown name 'sums' in --of"),
        (["--sizes", ""], "--sizes must name one at least"),
        (["--sizes", "0"], "--sizes: a size must be positive"),
        (["--rounds", "0"], "--rounds must be 1 or more, got 0"),
        (["--of", "collectives", "--ranks", "1"], "--ranks must be 2 or more"),
        (["--of", "collectives", "--size", "1"], "--size 1 is too small for 2 ranks"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.kernels: error: ")
    assert reason in error
    assert len(error.splitlines()) == 1
