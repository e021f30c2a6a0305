"""bench.io: fio's commands and output, and the summary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import io
from bench.harness.rounds import ContenderError, MissingError
from bench.io import SETTINGS, fio_command, fio_figures, run_fio
from offload.profile.measure import READ_SHARES


def fio_output(**changes: Any) -> str:
    job = {
        "error": 0,
        "usr_cpu": 10.0,
        "sys_cpu": 15.0,
        "job_runtime": 4000,
        "read": {"io_bytes": 6 * 10**9, "runtime": 3000},
        "write": {"io_bytes": 2 * 10**9, "runtime": 4000},
    }
    return "note: a remark\n" + json.dumps({"jobs": [job | changes]})


def test_fio_figures_by_its_own_clock() -> None:
    # 8 GB in the 4 s of the longer direction; a quarter of 4 s of CPU for them.
    assert fio_figures(fio_output()) == {"gbps": 2.0, "cpu_s_per_gb": 0.125}


@pytest.mark.parametrize("output", ["", "no brace", "{}", '{"jobs": []}', fio_output(error=5)])
def test_fio_output_that_is_none(output: str) -> None:
    with pytest.raises(ContenderError, match="fio"):
        fio_figures(output)


def test_fio_does_what_hetero_does() -> None:
    for settings in SETTINGS.values():
        command = fio_command("/a:b/file", 1 << 30, "mixed", settings)
        wanted = ("--filename=/a\\:b/file", "--direct=1", "--ioengine=io_uring", "--rw=rw",
                  "--size=1073741824", "--runtime=1000ms", *settings)  # fmt: skip
        assert set(wanted) <= set(command)


def test_fio_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="install fio"):
        run_fio(["fio"], False)


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_fio_runs(
    tmp_path: Path, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "DISK_WINDOW_S", 0.05)
    for pattern in READ_SHARES:
        command = fio_command(str(tmp_path / "file"), 1 << 22, pattern, settings)
        try:
            assert run_fio(command, bool(settings))["gbps"] > 0
        except ContenderError as refusal:
            pytest.skip(str(refusal))  # a kernel without io_uring


def test_the_best_fio_counts_for_each_pattern(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tuned one is the best at reading, the default at writing; hetero has half of it."""

    def run_fio(command: list[str], tuned: bool) -> dict[str, float]:
        rate = 4.0 if tuned == ("--rw=read" in command) else 2.0
        return {"gbps": rate, "cpu_s_per_gb": 1.0}

    monkeypatch.setattr(io, "run_fio", run_fio)
    monkeypatch.setattr(io, "_sample", lambda *_: {"gbps": 2.0, "cpu_s_per_gb": 0.5})
    arguments = ["--path", str(tmp_path), "--size", "16MiB", "--rounds", "2"]
    found = io.run(io.PROGRAM.parse(arguments))
    assert found["share_of_fio"] == {"read": 0.5, "write": 0.5, "mixed": 0.5}
    tuned = found["contenders"]["fio tuned"]
    assert (tuned["read_gbps"]["median"], tuned["write_gbps"]["median"]) == (4.0, 2.0)
    assert found["notes"][0].startswith("hetero / the best fio: read 0.500, ")
