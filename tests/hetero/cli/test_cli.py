"""`hetero train` as its user meets it: what it prints, writes, refuses and returns."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.cli.main import main
from hetero.job import job, loop
from hetero.job.job import choose_for_memory
from hetero.job.options import TrainOptions
from hetero.job.ranks import ALONE
from hetero.reporting.run_record import LINKS, PointList
from tests.support.cli_runs import draw_nothing, words_of
from tests.support.run_records import Page
from tests.support.training.loops import SMALLEST_MODEL

MODEL = {**SMALLEST_MODEL, "n_layer": 2, "n_embd": 64, "n_positions": 32}

Run = Callable[..., int]
Summary = Callable[..., dict[str, Any]]


@pytest.fixture
def pictures() -> None:
    """Has `train` draw the picture and the page, too."""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Run:
    """Runs `hetero train` on a tiny model and text in an empty working folder; arguments are as
    words_of() takes them."""
    if "pictures" not in request.fixturenames:
        draw_nothing(monkeypatch)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "in" / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 50)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    given = "train --model ../in/model.json --data ../in/text --max-steps 3 --seq-len 16"

    def run(*arguments: str | list[str]) -> int:
        try:
            return main(words_of(given, "--batch-size 2 --warmup 1", *arguments))
        except SystemExit as end:  # of what the parser itself refuses
            return int(end.code or 0)

    return run


@pytest.fixture
def summary_of(train: Run, capsys: pytest.CaptureFixture[str]) -> Summary:
    """What such a run prints under --json, which is all of its stdout, and strict."""

    def run(*arguments: str | list[str]) -> dict[str, Any]:
        assert train("--json", *arguments) == 0
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        found: dict[str, Any] = json.loads(out, parse_constant=refuse)
        return found

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return run


def metrics_in(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def summary_in(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    return found


@pytest.mark.usefixtures("pictures")
def test_json_is_one_object_and_the_run_folder_is_whole(summary_of: Summary) -> None:
    summary = summary_of("--policy nvme --run-dir run --grad-accum 2")
    assert len(summary["losses"]) == len(summary["step_s"]) == summary["steps"] == 3
    assert summary["losses"][0] == pytest.approx(5.545, abs=0.3)
    assert summary["losses"][-1] < summary["losses"][0]
    times = (summary[f"{name}_s"] for name in ("step", "forward", "backward", "optimizer"))
    for parts in zip(*times, strict=True):
        assert parts[0] >= sum(parts[1:]) > 0
    assert summary["engine"] in ("io_uring", "threads")
    assert set(summary["bytes_per_step"]) == set(LINKS)
    for tier in ("device", "host", "disk"):
        budget = summary["budget_bytes"][tier]
        assert budget is None or summary["peak_managed_bytes"][tier] <= budget
    assert summary["peak_managed_bytes"]["disk"] > 0
    assert summary["peak_rss_bytes"] > summary["peak_managed_bytes"]["host"]

    run = Path("run")
    names = "config.json figure.png metrics.jsonl model report.html summary.json"
    assert sorted(f.name for f in run.iterdir()) == names.split()
    assert summary_in("run") == summary
    assert json.loads((run / "config.json").read_text())["accumulate"] == 2
    lines = metrics_in("run")
    assert [line["loss"] for line in lines] == summary["losses"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    page = Page.of((run / "report.html").read_text())
    assert f"{summary['losses'][-1]:.4g}" in page.text["facts"]
    assert "3 of 3, finished" in page.text["facts"]
    assert {"run", "timeline"} <= set(page.ids)
    # The learning rate warms up through the scheduler and falls in the last step.
    assert lines[0]["lr"] < lines[1]["lr"] > lines[2]["lr"]


def test_the_summary_of_a_long_run_is_short(
    summary_of: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of as many steps as there are points; all steps are counted, and have metrics. Steps
    whose gradients overflow have no norm."""
    monkeypatch.setattr("hetero.reporting.recorder.PointList", partial(PointList, most=4))
    summary = summary_of("--dtype fp16 --policy nvme --run-dir run --max-steps 9")
    assert summary["dtype"] == "fp16"
    lines, kept = metrics_in("run"), summary["step_numbers"]
    assert len(lines) == summary["steps"] == 9
    assert (kept[0], kept[-1]) == (1, 9)
    assert len(kept) <= 5
    assert summary["losses"] == [lines[number - 1]["loss"] for number in kept]
    moved = {link: sum(line["traffic_bytes"][link] for line in lines) for link in LINKS}
    assert summary["total_bytes"] == moved


def test_the_last_two_steps_as_a_trace(summary_of: Summary) -> None:
    memory = "--host-memory 800KiB --chunk-numel 8192"  # optimizer states on disk
    summary = summary_of(memory, "--run-dir run --timeline run/steps.json --grad-accum 2")
    assert summary["timeline"] == "run/steps.json"
    assert summary_in("run") == summary
    trace = json.loads(Path("run/steps.json").read_text())["traceEvents"]
    names = [event["name"] for event in trace if event["ph"] == "X"]
    for part, times in (("forward", 4), ("backward", 4), ("optimizer", 2)):  # of 3 steps, the last
        assert names.count(part) == times
    tracks = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    counters = {event["name"] for event in trace if event["ph"] == "C"}
    assert {"RAM, bytes held", "NVMe, bytes held", "NVMe read, bytes so far"} <= counters
    assert {"training loop", "NVMe read"} <= {name.rstrip(" 0123456789") for name in tracks}


def test_a_run_of_one_step_has_a_timeline_of_one(summary_of: Summary) -> None:
    """And without clipping no norm."""
    summary = summary_of("--policy cpu --max-steps 1 --max-grad-norm 0 --timeline steps.json")
    trace = json.loads(Path("steps.json").read_text())["traceEvents"]
    assert [event["name"] for event in trace].count("forward") == 1
    assert summary["grad_norms"] == [None]


EMULATED = "--backend emulated --device-memory 64MiB --link-gbps 8"


def test_placement_and_disk_engine_do_not_change_the_numbers(summary_of: Summary) -> None:
    """Nor does computing activations again."""
    found = []
    for arguments in (
        "--policy cpu",
        "--policy nvme --io-engine threads --no-prefetch",
        "--policy nvme --nvme-path ../in --nvme-path .",
        f"--policy cpu {EMULATED}",
        f"--policy cuda {EMULATED}",
        "--policy cpu --gradient-checkpointing",
        "--policy cpu --gradient-checkpointing --activation-memory auto",
    ):
        summary = summary_of(arguments)
        moved = summary["bytes_per_step"]["h2d"] > 0 and summary["bytes_per_step"]["d2h"] > 0
        assert moved == ("--backend" in arguments and "cuda" not in arguments)
        again = any("Of 2 calls of blocks 2" in note for note in summary["notes"])
        assert again == ("auto" in arguments)
        found.append(summary["losses"] + summary["grad_norms"])
    assert all(other == found[0] for other in found)


def test_a_tiled_loss_is_the_same_loss(
    train: Run, summary_of: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp32 = "--dtype fp32 --policy cpu"
    whole, tiled = (summary_of(fp32, option)["losses"] for option in ("", "--tiled-loss"))
    assert tiled[0] == whole[0]
    assert tiled == pytest.approx(whole, rel=1e-6)

    class WholeLogitsError(Exception):
        pass

    def values(*_: object) -> None:
        raise WholeLogitsError

    monkeypatch.setattr("hetero.tiling.heads._Logits.values", values)
    assert train("--policy cpu --tiled-loss") == 0, "nothing needs whole logits"


def _limited(process_bytes: int | None) -> Any:
    return SimpleNamespace(process_bytes=lambda ranks: process_bytes, nvme_paths=("disk",))


@pytest.mark.parametrize(
    ("wanted", "limit", "tiled"),
    [
        (None, None, False),
        (None, 1 << 20, False),
        (None, (1 << 20) - 4, True),
        (False, 1 << 10, False),
        (True, None, True),
    ],
)
def test_the_loss_is_tiled_where_whole_logits_would_take_a_quarter(
    monkeypatch: pytest.MonkeyPatch, wanted: bool | None, limit: int | None, tiled: bool
) -> None:
    made: list[torch.nn.Module] = []
    monkeypatch.setattr("hetero.tile_heads", made.append)
    options = TrainOptions(tiled_loss=wanted, batch_size=2, seq_len=32)  # 256 KiB in whole
    notes: list[str] = []
    found = choose_for_memory(options, _limited(limit), torch.nn.Identity(), 256, ALONE, notes)
    assert bool(made) == found == tiled
    assert ["--recompute" in note for note in notes[:1]] == [True] * (limit is not None)
    assert bool(notes[1:]) == (tiled and wanted is None)
    assert all("256.0 KiB" in note and "--no-tiled-loss" in note for note in notes[1:])


def test_what_a_limit_of_the_process_brings_is_said(
    train: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """With that limit alone activations are counted, and blocks may be computed again."""
    assert train("--json --process-memory 16GiB --policy cpu") == 0
    out, err = capsys.readouterr()
    assert "step 3/3" in err
    assert "note: activations are part of the 16.0 GiB of the process: what finds no room" in err
    (words,) = (note for note in json.loads(out)["notes"] if "calls of blocks" in note)
    assert "Of 2 calls of blocks 0 are computed again in backward" in words


def test_a_limit_of_the_process_that_is_too_small_is_refused_by_its_name(
    train: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as host_memory, which the user has not given."""
    assert train("--process-memory 20MiB") == 2
    err = capsys.readouterr().err
    assert "process_memory is 20.0 MiB" in err
    assert "raise process_memory to" in err
    assert "host_memory" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--policy nvmee", "nvme"),
        ("--backend emulated", "needs device_memory"),
        ("--link-gbps 8", "link_gbps is of no use"),
        ("--host-memory 4KiB", "host_memory is 4.0 KiB"),
        ("--host-memory many", "cannot read 'many' as a size"),
        ("--nvme-path ../in/none", "none"),
        ("--nvme-path ../in/text", "director"),
        ("--nvme-path ../in --nvme-path ../in/", "one directory twice"),
        ("--data ../in/none", "--data ../in/none: no such file"),
        (f"--data {os.devnull}", "is empty"),
        ("--data=", "--data is given as an empty text"),
        ("--seq-len 5000", "one sequence needs 5001"),
        ("--config ../in/none.json", "cannot read --config ../in/none.json"),
        ("--lr nan", "--lr must be a finite number"),
        ("--dtype int8", "int8"),
        ("--run-dir ../in/text", "cannot make --run-dir"),
        ("--timeline /proc/none/steps.json", "--timeline /proc/none/steps.json cannot be"),
        ("--timeline ../in", "--timeline ../in is a folder; name a file"),
        ("--host-memory 64KiB", "smallest"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    train: Run, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert train("--json", arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hetero train: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_a_default_that_is_too_small_becomes_what_works(
    train: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large embedding, or buffers of ranks, may take more than a third of the state."""
    monkeypatch.setattr(job, "LEAST_DEFAULT_HOST_BYTES", 4096)
    monkeypatch.setattr(job, "usual_state_bytes", lambda *_: 0)
    assert train("--policy nvme --run-dir run --no-save-model") == 0
    assert 64 << 10 < summary_in("run")["budget_bytes"]["host"] < 4 << 20


def test_refusals_leave_no_open_file(train: Run) -> None:
    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    train("--host-memory 4KiB")
    before = open_files()
    for _ in range(3):
        assert train("--host-memory 4KiB") == 2
    assert open_files() == before


def test_diverged_loss_stops_with_advice_and_keeps_what_there_is(
    train: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code = train("--json --run-dir run --lr 1e30 --max-grad-norm 0 --dtype fp32")
    out, err = capsys.readouterr()
    assert code == 1
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("hetero train: error: the loss became nan in step 2")
    assert "--lr" in last
    assert "--max-grad-norm 1" in last
    assert (summary_in("run")["status"], summary_in("run")["steps"]) == ("failed", 1)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (KeyboardInterrupt(), "interrupted", 130),
        (torch.OutOfMemoryError("CUDA out of memory"), "failed", 1),
    ],
)
def test_what_ends_a_run_keeps_what_there_is(
    error: BaseException,
    status: str,
    code: int,
    train: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C, and a device without memory; before the first step there is nothing."""
    make, ends_in = loop.one_step, 1

    def step(job: Any, number: int) -> Any:
        assert json.loads(Path("run/config.json").read_text())["policy"] == "cpu"
        if number == ends_in:
            raise error
        return make(job, number)

    monkeypatch.setattr(loop, "one_step", step)
    assert train("--run-dir run --policy cpu") == code
    assert not Path("run").exists()
    ends_in = 3
    assert train("--run-dir run --policy cpu") == code
    assert capsys.readouterr().err.endswith(f"hetero train: error: {error}\n") == (code == 1)
    assert (summary_in("run")["status"], summary_in("run")["steps"]) == (status, 2)
    assert Path("run/figure.png").exists()


def test_a_picture_that_cannot_be_written_is_a_failure_of_the_run(
    train: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hetero.reporting.charts.draw_picture", fail)
    assert train("--json --policy cpu") == 1
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", "hetero train: error: No space left on device")
