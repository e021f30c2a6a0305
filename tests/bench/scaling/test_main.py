"""bench.scaling: its table, JSON and pictures, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.scaling.__main__ import main
from hetero.planning.profiles import find_profile
from tests.support.training.planning import make_profile

SMALL = ("--models", "gpt2", "--nodes", "1,2")


def test_json_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "steps.png"
    assert main([*SMALL, "--picture", str(picture), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result = json.loads(out)
    assert [(row["ranks"], row["hybrid"]) for row in result["steps"]] == [
        (8, False),
        (16, False),
        (16, True),
    ]
    for row in result["steps"]:
        assert abs(row["error"]) < 0.05
        assert row["simulated_s"] >= row["computing_s"] > 0
    assert {row["kind"] for row in result["stragglers"]} == {"slower", "jitter", "stall_s"}
    for row in result["stragglers"]:
        assert row["seconds"][0] <= min(row["seconds"][1:]) * (1 + 1e-9)
    for row in result["collectives"]:
        shares = row["latency_share"]
        assert shares == sorted(shares, reverse=True)
    for path in (picture, tmp_path / "steps-stragglers.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert result["pictures"] == [str(picture), str(tmp_path / "steps-stragglers.png")]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--sequences", "2", "--chunk-numel", "4Mi"]) == 0
    out = capsys.readouterr().out
    for part in ("nothing is measured", "two levels", "a machine", "stands still", "all-to-all"):
        assert part in out


def test_a_model_that_does_not_fit_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"host_bytes": 1 << 30, "device_bytes": None, "rank_bytes_per_s": 1e9}
    make_profile(**small, node_bytes_per_s=1e9, nvme_bytes=8).save(tmp_path / "small.json")
    arguments = ("--models", "gpt2-xl", "--nodes", "1", "--profile", str(tmp_path / "small.json"))
    assert main(arguments) == 0
    assert "smallest that works" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--models", "lama"), "unknown name 'lama' in --models"),
        (("--models", ""), "--models must name one"),
        (("--nodes", "some"), "--nodes must be a whole number"),
        (("--nodes", "0"), "--nodes must be 1 or more"),
        (("--sequences", "0"), "--sequences must be 1 or more"),
        (("--chunk-numel", "few"), "--chunk-numel: cannot read"),
        (("--host-memory", "much"), "--host-memory: cannot read"),
        (("--picture", "steps.txt"), "--picture"),
        (("--profile", "none"), "no profile is called"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main([*SMALL, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_a_profile_without_a_network_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_profile().save(tmp_path / "alone.json")
    assert main([*SMALL, "--profile", str(tmp_path / "alone.json")]) == 2
    assert "says nothing about the network" in capsys.readouterr().err
    device = ("--device-memory", "1GiB", "--profile", str(tmp_path / "alone.json"))
    assert main([*SMALL, *device]) == 2
    assert "no device with memory of its own" in capsys.readouterr().err
    assert find_profile("8xh200-node").node_bytes_per_s is not None
