"""bench/cuda, bench/work/gpt and bench/cuda_check, as far as they go without a GPU."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import cuda, cuda_check
from bench.cuda import measure_copies
from bench.harness.machine import ROOT
from bench.work.gpt import SHAPES, VOCABULARY, Gpt, fill, quick_init
from tests.support.native.fake_cuda import FakeRuntime
from tests.support.waiting import until


def test_the_model_is_filled_and_learns() -> None:
    shape = SHAPES["tiny"]
    normal = nn.init.normal_
    with quick_init():
        model = Gpt(shape)
    assert nn.init.normal_ is normal
    fill(model)
    tokens = torch.randint(0, VOCABULARY, (shape.batch_size, shape.seq_len))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("name", "billions"), [("gpt2-1.3b", 1.3), ("gpt-6b", 6.0)])
def test_shapes(name: str, billions: float) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        numel = sum(p.numel() for p in Gpt(shape).parameters())
    assert numel / 1e9 == pytest.approx(billions, rel=0.05)
    attention = 6 * shape.layers * shape.width * shape.seq_len
    assert shape.flop(numel) == shape.tokens * (6 * numel + attention)


def test_without_a_device_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "cuda_available", lambda: False)
    assert cuda.main([]) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_check.main() == 0
    assert capsys.readouterr().out.count("skipped: ") == 2


def test_the_table_names_what_is_missing() -> None:
    ok = {
        "status": "ok",
        "step_s": 0.5,
        "tokens_per_s": 8000.0,
        "tflop_per_s": 100.0,
        "device_peak_bytes": 1 << 30,
        "rss_bytes": 1 << 30,
    }
    rows = [
        {"model": "m", "contender": "100", **ok, "tokens_per_s": 10000.0},
        {"model": "m", "contender": "10", **ok},
        {"model": "m", "contender": "fsdp2", "status": "out of time"},
    ]
    found = {"device": "GPU", "rows": rows, "copies": {"status": "no time left"}}
    text = "\n".join(cuda.show(found))
    assert "copies and updates: no time left" in text
    assert "hetero, 10 %" in text
    assert "80%" in text
    assert "out of time" in text


COPIES = {
    "status": "ok",
    "h2d": 47e9,
    "h2d_alone": 50e9,
    "d2h": 46e9,
    "d2h_alone": 50e9,
    "d2h_added": 20e9,
    "memory": 200e9,
    "update": 190e9,
}


def row(model: str, kind: str, step_s: float, **more: float) -> dict[str, Any]:
    moved = {"h2d_bytes": 0, "d2h_bytes": 0, "disk_bytes": 0}
    speed = {"step_s": step_s, "tokens_per_s": 1000 / step_s}
    return {"model": model, "contender": kind, "status": "ok", **speed, **moved, **more}


def test_copies_have_their_share_of_the_link() -> None:
    found = cuda.shares(COPIES)
    assert found["H2D"] == {"own": 47e9, "alone": 50e9, "share": 0.94}
    assert found["D2H, added"]["share"] == 0.4
    assert found["the CPU's Adam"]["share"] == 0.95
    assert cuda.shares({"status": "no time left"}) == {}


@pytest.mark.parametrize(
    ("of_row", "by", "of_bound"),
    [
        (row("m", "100", 1.0), "compute", 1.0),
        (row("m", "50", 1.1, h2d_bytes=25e9, d2h_bytes=10e9), "compute", 1.1),
        (row("m", "25", 2.4, h2d_bytes=100e9, d2h_bytes=10e9), "link", 1.2),
        (row("m", "25", 1.5, h2d_bytes=50e9, d2h_bytes=19e9), "update", 1.154),  # 247 GB of RAM's
        (row("m", "10", 4.0, h2d_bytes=50e9, d2h_bytes=19e9, disk_bytes=9e9), "NVMe", 1.111),
    ],
)
def test_a_step_stands_beside_its_slowest_part(
    of_row: dict[str, Any], by: str, of_bound: float
) -> None:
    found = cuda.bound(of_row, 1.0, COPIES, 2.5e9)
    assert (found["bound_by"], round(found["of_bound"], 3)) == (by, of_bound)


def test_a_part_that_was_not_measured_leaves_no_bound() -> None:
    of_row = row("m", "10", 4.0, disk_bytes=9e9)
    assert cuda.bound(of_row, 1.0, COPIES, None) == {}
    assert cuda.bound(of_row, None, COPIES, 1e9) == {}
    assert cuda.bound(of_row, 1.0, {"status": "no time left"}, 1e9) == {}
    assert cuda.bound({"status": "out of time"}, 1.0, COPIES, 1e9) == {}


def test_copies_are_measured_as_training_makes_them() -> None:
    runtime = FakeRuntime()
    found = measure_copies(runtime, chunk_bytes=8192, chunks=3)  # type: ignore[arg-type]
    assert set(found) == {"h2d", "h2d_alone", "d2h", "d2h_alone", "d2h_added"}
    assert all(rate > 0 for rate in found.values())
    assert runtime.page_locked == {}


def test_every_contender_runs_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[str] = []

    def run(module: list[str], deadline_s: float) -> dict[str, Any]:
        started.append(module[0])
        if module == ["bench.cuda", "--link"]:
            return COPIES
        spec = json.loads(Path(module[1]).read_text())
        assert (spec["contender"], spec["device"]) == ("hetero-whole", "cuda")
        assert spec["options"]["nvme_path"] == str(tmp_path)
        moved = {"h2d": 0, "d2h": 0, "disk_read": 4e9, "disk_write": 5e9}
        return {"status": "ok", "step_s": 1.0, "params": 6e9, "bytes_per_step": moved}

    def measure_disk(paths: tuple[str, ...], _: object) -> dict[str, float]:
        assert paths == (str(tmp_path),)
        return {"mixed": 2e9}

    monkeypatch.setattr(cuda, "cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(cuda, "_run", run)
    monkeypatch.setattr(cuda, "measure_disk", measure_disk)
    words = ["--models", "gpt-6b", "--contenders", "25,100", "--nvme", str(tmp_path)]
    assert cuda.main([*words, "--rows", str(tmp_path / "rows")]) == 0
    assert started == ["bench.cuda", *["bench.work.gpt_training"] * 2]
    table = capsys.readouterr().out
    for text in ("D2H, added", "gpt-6b hetero, 25 %", "NVMe", "4.500"):
        assert text in table
    assert (tmp_path / "rows").read_text().count("\n") == 3
    assert cuda.main([*words, "--json"]) == 0


def test_what_a_contender_trains() -> None:
    numel = SHAPES["tiny"].params(VOCABULARY)
    quarter, whole = (cuda.spec_of("tiny", kind, None) for kind in ("25", "100"))
    assert quarter.options["device_memory"] == int(cuda.WANTED_BYTES * numel * 0.25)
    assert whole.options["device_memory"] > cuda.WANTED_BYTES * numel
    plain = cuda.spec_of("tiny", "torch", "/nvme")
    assert (plain.contender, plain.options, plain.device) == ("torch", {}, "cuda")


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"status": "trained", "error": None}, "ok"),
        ({"status": "late", "error": "not done after 9 s"}, "out of time"),
        ({"status": "refused", "error": "too small"}, "failed: too small"),
    ],
)
def test_how_a_process_ended_is_said(
    found: dict[str, Any], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "run_trial", lambda command, timeout_s: found)
    assert cuda._run(["module"], time.monotonic() + 100)["status"] == status
    assert cuda._run(["module"], time.monotonic())["status"] == "no time left"


# What a machine with torch for a GPU may lack.
BLOCKED = (
    "accelerate",
    "hypothesis",
    "matplotlib",
    "pydantic",
    "rich",
    "safetensors",
    "transformers",
)
WITHOUT = f"""
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import bench.cuda, bench.cuda_check, pytest
options = ["-q", "--collect-only", "--confcutdir=tests/cuda", "-p", "no:cacheprovider"]
raise SystemExit(pytest.main([*options, "-p", "no:xdist", "tests/cuda"]))
"""


def test_the_check_needs_torch_numpy_psutil_and_pytest_alone() -> None:
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) tests collected", done.stdout)[0]) > 250


def test_what_tests_said_is_counted(tmp_path: Path) -> None:
    results = tmp_path / "training.jsonl"
    assert cuda_check.summary(results) == "no test ended"
    lines = [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed"}]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cuda_check.summary(results) == "1 passed, 1 failed, 0 skipped (b)"


HOLDER = """
import fcntl, subprocess, sys
child = "import fcntl, sys, time; fcntl.flock(open(sys.argv[1], 'w'), 2); print(1, flush=True); "
subprocess.run([sys.executable, "-c", child + "time.sleep(600)", sys.argv[1]])
"""


def test_a_process_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    log, lock = tmp_path / "log", tmp_path / "lock"
    process = cuda_check._start([sys.executable, "-c", HOLDER, str(lock)], log, {})
    until(lambda: log.read_bytes())  # a child of its child has the lock
    ended = cuda_check._start([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log2", {})
    ended.wait()
    assert cuda_check._finish({"it": process, "ended": ended}, 0.0) == {"it": 124, "ended": 3}
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # nobody has it any more
