"""bench/cuda, bench/work/gpt and bench/cuda_check, as far as they go without a GPU."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import cuda, cuda_check
from bench.cuda_copies import measure_copies, measure_updates
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
    met = cuda.Aim("what is aimed at", 0.95, 0.9, True)
    found = {"device": "GPU", "rows": rows, "aims": [vars(met)]}
    text = "\n".join(cuda.show(found))
    assert "what is aimed at" in text
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
    "update_beside": 150e9,
    "both": 40e9,
}


def row(model: str, kind: str, step_s: float, **more: float) -> dict[str, Any]:
    moved = {"h2d_bytes": 0, "d2h_bytes": 0, "disk_bytes": 0}
    speed = {"step_s": step_s, "tokens_per_s": 1000 / step_s}
    return {"model": model, "contender": kind, "status": "ok", **speed, **moved, **more}


def figures(rows: list[dict[str, Any]], disk_bytes_per_s: float | None = None) -> dict[str, Any]:
    found = cuda.aims(rows, COPIES, disk_bytes_per_s)
    return {aim.what: (aim.figure and round(aim.figure, 3), aim.met(), aim.note) for aim in found}


def test_copies_have_their_share_of_the_link() -> None:
    found = figures([])
    assert found["H2D: bytes/s, of the link alone"] == (0.94, True, "47.0 of 50.0 GB/s")
    assert found["D2H, added: bytes/s, of the link alone"][:2] == (0.4, False)


def test_a_step_stands_beside_its_slowest_part() -> None:
    rows = [
        row("m", "100", 1.0),
        row("m", "50", 1.1, h2d_bytes=25e9, d2h_bytes=10e9),
        row("m", "25", 2.4, h2d_bytes=100e9, d2h_bytes=10e9),
        row("m", "10", 4.0, h2d_bytes=50e9, d2h_bytes=19e9, disk_bytes=9e9),
        row("n", "100", 1.0),
        row("n", "25", 1.5, h2d_bytes=50e9, d2h_bytes=19e9),  # 247 GB of RAM's traffic
    ]
    found = figures(rows, 2.5e9)
    steps = [found[f"m: step with {kind} %, of the slowest part"][:2] for kind in (100, 50, 25, 10)]
    assert steps == [(1.0, True), (1.1, True), (1.2, False), (1.111, True)]
    assert found["n: step with 25 %, of the slowest part"][:2] == (1.154, False)
    assert found["m: tokens/s with 25 % of the state on the GPU, of 100 %"][:2] == (0.417, False)
    # A disk that was used and not measured is no reason to leave it out of the bound.
    unmeasured = figures(rows)["m: step with 10 %, of the slowest part"]
    assert unmeasured == (None, None, "NVMe: not measured")


def test_a_link_that_was_not_measured_is_said() -> None:
    found = cuda.aims([row("m", "100", 1.0)], {"status": "no time left"}, None)
    assert [aim.note for aim in found[:5]] == ["no time left"] * 4 + ["link: no time left"]
    assert "- >= 0.90" in found[0].line()


def test_copies_are_measured_as_training_makes_them() -> None:
    runtime = FakeRuntime()
    found = measure_copies(runtime, chunk_bytes=8192, chunks=3)  # type: ignore[arg-type]
    assert set(found) == {"h2d", "h2d_alone", "d2h", "d2h_alone", "d2h_added"}
    assert all(rate > 0 for rate in found.values())
    assert runtime.page_locked == {}


def test_updates_are_measured_alone_and_beside_copies() -> None:
    runtime = FakeRuntime()
    found = measure_updates(runtime, numel=1 << 20, copied_bytes=1 << 16)  # type: ignore[arg-type]
    assert set(found) == {"memory", "update", "update_beside", "both"}
    assert found["both"] >= 0  # so short an update may end before a copy gets a CPU
    assert all(rate > 0 for name, rate in found.items() if name != "both")


def test_every_contender_runs_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[str] = []

    def run(one: str, nvme: str | None, deadline_s: float) -> dict[str, Any]:
        started.append(one)
        if one == "link":
            return COPIES
        return row("gpt-6b", one.partition("/")[2], 1.0, disk_bytes=9e9, tflop_per_s=1.0)

    def measure_disk(paths: tuple[str, ...], _: object) -> dict[str, float]:
        assert paths == (str(tmp_path),)
        return {"mixed": 2e9}

    monkeypatch.setattr(cuda, "cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(cuda, "_run", run)
    monkeypatch.setattr(cuda, "measure_disk", measure_disk)
    words = ["--models", "gpt-6b", "--contenders", "25,100", "--nvme", str(tmp_path)]
    assert cuda.main([*words, "--rows", str(tmp_path / "rows")]) == 0
    assert started == ["link", "gpt-6b/25", "gpt-6b/100"]
    table = capsys.readouterr().out
    for text in ("D2H, added: bytes/s", "gpt-6b: step with 25 %", "NVMe 4.500 s"):
        assert text in table
    assert (tmp_path / "rows").read_text().count("\n") == 3
    assert cuda.main([*words, "--json"]) == 0


def test_a_step_is_timed_with_what_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    moved = [0, 0, 0]

    def step(tokens: torch.Tensor) -> None:
        # What is moved before the measured steps does not count.
        moved[:] = (moved[0] + 10, moved[1] + 20, moved[2] + 30)

    prepared = cuda._Prepared(step, 1, lambda: (moved[0], moved[1], moved[2]))
    times_s, of_a_step = cuda._time(prepared, SHAPES["tiny"])
    assert len(times_s) == cuda.STEPS
    assert of_a_step == [10, 20, 30]


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
