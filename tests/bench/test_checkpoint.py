"""bench.checkpoint: what it counts, its JSON, what peers save and load, and how it refuses."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from bench import checkpoint as bench_checkpoint
from bench.checkpoint import HeteroCheckpoints, main
from bench.peers.checkpoint_timing import MemoryAbove, drop_pages, files_bytes, steps_beside
from bench.peers.checkpoint_torch import CheckpointPeer
from bench.train import write_workload
from bench.work import bandwidths, job_steps
from hetero.job.job import open_job
from hetero.job.options import TrainOptions
from hetero.job.run_folder import RunFolder

MODEL = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 16,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
STATE_BYTES = 12  # per parameter: master and two moments


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration's file; yardsticks and pauses are smaller than what a machine needs to be
    measured."""
    monkeypatch.setattr(bandwidths, "DISK_WINDOW_S", 0.01)
    monkeypatch.setattr(job_steps, "QUIET_S", 0.01)
    monkeypatch.setattr(job_steps, "WARM_UP_STEPS", 2)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 50)
    (tmp_path / "nvme").mkdir()
    return str(tmp_path / "model.json")


@pytest.fixture
def options(model: str, tmp_path: Path) -> list[str]:
    return [
        *("--config", model, "--seq-len", "16", "--steps", "1", "--rounds", "1"),
        *("--io-size", "32MiB", "--path", str(tmp_path / "nvme")),
    ]


def train_options(model: str, tmp_path: Path, **more: Any) -> TrainOptions:
    return TrainOptions(
        config=model, data=str(tmp_path / "text"), seq_len=16, batch_size=1, clip=0.0, **more
    )


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.slow
def test_json(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, *options, "--host-memory", "1200KiB", "--peers", "torch,dcp")
    assert result["policy"] == "nvme"
    assert result["budget_bytes"]["host"] == 1200 << 10
    found = {
        name: {metric: spread["median"] for metric, spread in figures.items()}
        for name, figures in result["contenders"].items()
    }
    nbytes = found["save"]["bytes"]
    assert nbytes > STATE_BYTES * result["params"]
    for what, direction, other in (("save", "written", "read"), ("load", "read", "written")):
        figures = found[what]
        # (Manifests differ by a few bytes, and a load may be of the round before.)
        assert figures["bytes"] == pytest.approx(nbytes, rel=0.01)
        # The state that is on NVMe moves to the checkpoint and back.
        assert figures[f"{direction}_bytes"] >= figures["bytes"]
        assert figures[f"{other}_bytes"] > 0
        moved = figures["read_bytes"] + figures["written_bytes"]
        assert figures["disk_s"] == pytest.approx(moved / found[f"disk {what}"]["gbps"] / 1e9)
        assert figures["of_the_disk"] == pytest.approx(figures["disk_s"] / figures["s"])
        assert figures["gbps"] == pytest.approx(figures["bytes"] / figures["s"] / 1e9)
        for peer in ("torch", "dcp"):
            theirs = found[f"{peer} {what}"]
            assert theirs["bytes"] > STATE_BYTES * result["params"]
            faster = figures["gbps"] / theirs["gbps"]
            assert theirs["hetero_is_faster_by"] == pytest.approx(faster)
    assert "torch beside" not in found
    for before in ("", "dcp "):
        figures, alone_s = found[f"{before}beside"], found[f"{before}step"]["step_s"]
        assert figures["steps"] >= 1
        assert figures["save_s"] >= figures["pause_s"] > 0
        lost_s = figures["pause_s"] + figures["steps"] * (figures["step_s"] - alone_s)
        assert figures["lost_s"] == pytest.approx(lost_s)
        assert figures["slower_by"] == pytest.approx(figures["step_s"] / alone_s)
    assert result["notes"] == []
    assert result["machine"]["cores"] >= 1
    assert "--io-size 32MiB" in result["command"]
    assert list((tmp_path / "nvme").iterdir()) == []


@pytest.mark.slow
def test_table(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--policy", "cpu", "--peers", "torch"]) == 0
    out = capsys.readouterr().out
    for text in ("model cpu", "save", "load", "/ disk", "torch load", "lost"):
        assert text in out
    assert "dcp" not in out.partition("bench.checkpoint, ")[2]
    assert list((tmp_path / "nvme").iterdir()) == []


@pytest.mark.parametrize("policy", ["nvme", "cpu"])
def test_commits(
    policy: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All state in RAM is written with each commit, once; nothing is left in the end."""
    more = ("--of", "commits", "--steps", "4", "--every", "1,4", "--policy", policy)
    result = run_json(capsys, *options, *more)
    found, files = result["contenders"], result["file_bytes"]
    names = ["plain", "verified reads", "a commit every 1", "a commit every 4"]
    assert list(found) == names
    plain, _, each, rarely = (found[name]["disk_write"]["median"] for name in names)
    state_bytes = STATE_BYTES * result["params"]  # (chunks have some room besides)
    if policy == "cpu":
        assert plain == 0 == files["plain"]
        assert state_bytes <= each <= 2 * state_bytes
        assert rarely == pytest.approx(each / 4, rel=0.01)
        assert files["durable"] >= 2 * each
    else:
        assert each >= rarely
        assert files["durable"] > files["plain"] > state_bytes / 2
    assert found["plain"]["slower_by"]["median"] == 1.0
    assert not list((tmp_path / "nvme").iterdir())


def test_a_peer_that_fails_is_a_note(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_checkpoint.sys, "executable", "/nonexistent/python")
    result = run_json(capsys, *options, "--peers", "torch")
    assert "torch save" not in result["contenders"]
    assert [note.partition(":")[0] for note in result["notes"]] == ["torch save", "torch load"]
    assert result["contenders"]["save"]["s"]["median"] > 0


def test_without_nvme_a_save_only_writes(model: str, tmp_path: Path) -> None:
    options = train_options(model, tmp_path, policy="cpu")
    with RunFolder(str(tmp_path)) as folder, open_job(options, folder) as job:
        own = HeteroCheckpoints(job, tmp_path / "nvme")
        saved, loaded = own.save(), own.load()
        assert own.read_share == {"save": 0.0, "load": 1.0}
    assert saved["written_bytes"] == saved["bytes"] == files_bytes(tmp_path / "nvme")
    assert loaded["read_bytes"] == saved["bytes"]
    assert saved["read_bytes"] == loaded["written_bytes"] == 0


def test_what_a_save_moves_of_state_on_nvme(model: str, tmp_path: Path) -> None:
    options = train_options(model, tmp_path, policy="nvme", host_memory="1200KiB")
    with RunFolder(str(tmp_path)) as folder, open_job(options, folder) as job:
        own = HeteroCheckpoints(job, tmp_path / "nvme")
        own.warm_up()
        saved, params = own.save(), job.setting.params
        share = saved["read_bytes"] / (saved["read_bytes"] + saved["written_bytes"])
        assert own.read_share["save"] == share
    # Of 12 bytes a parameter those are read that no buffer and no home in RAM has.
    in_ram = 1200 << 10
    assert STATE_BYTES * params - in_ram <= saved["read_bytes"] <= STATE_BYTES * params * 1.1


def test_limits_and_losses_are_those_of_a_round() -> None:
    made = {
        "save": {"s": 4.0, "gbps": 1.0, "read_bytes": 2e9, "written_bytes": 4e9},
        "disk save": {"gbps": 3.0},
        "dcp save": {"s": 8.0, "gbps": 0.5},
        "step": {"step_s": 1.0},
        "beside": {"pause_s": 0.5, "steps": 2, "step_s": 1.5},
    }
    found = bench_checkpoint._of_transfer("save", "save", made)
    assert found == {"disk_s": 2.0, "of_the_disk": 0.5}
    found = bench_checkpoint._of_transfer("dcp save", "save", made)
    assert found == {"hetero_is_faster_by": 2.0}
    found = bench_checkpoint._of_beside("beside", made)
    assert found == {"lost_s": 0.5 + 2 * 0.5, "slower_by": 1.5}


def test_steps_go_on_until_the_save_has_ended() -> None:
    end = threading.Event()
    watched = threading.Event()
    made: list[int] = []

    def step() -> None:
        made.append(len(made))
        if len(made) == 3:
            end.set()
            # The watcher has its turn before the next look.
            assert watched.wait(60)

    def wait() -> None:
        assert end.wait(60)
        watched.set()

    found = steps_beside(lambda: wait, step)
    assert found["steps"] == len(made) >= 3
    assert found["save_s"] >= found["pause_s"]


def test_a_save_that_fails_beside_steps_is_raised() -> None:
    def wait() -> None:
        raise ValueError("no space")

    with pytest.raises(ValueError, match="no space"):
        steps_beside(lambda: wait, lambda: None)


def test_memory_above_is_the_peak_since_it_began() -> None:
    big = 64 << 20
    with MemoryAbove() as earlier:
        torch.ones(big, dtype=torch.uint8)
    with MemoryAbove() as nothing:
        pass
    assert earlier.nbytes >= big * 0.9
    assert nothing.nbytes < big // 4


@pytest.mark.parametrize("how", ["torch", "dcp"])
def test_what_a_peer_loads_is_what_it_saved(how: str, model: str, tmp_path: Path) -> None:
    workload = tmp_path / "workload.json"
    write_workload(train_options(model, tmp_path, steps=3, threads=1), workload)
    threads = torch.get_num_threads()
    try:
        peer = CheckpointPeer({"workload": str(workload), "folder": str(tmp_path / "nvme")})
    finally:
        torch.set_num_threads(threads)

    def state() -> list[torch.Tensor]:
        states = peer._peer.optimizer.state.values()
        moments = [s[key].clone() for s in states for key in ("exp_avg", "exp_avg_sq", "step")]
        return [*(p.detach().clone() for p in peer._peer.model.parameters()), *moments]

    saved = peer.sample({"what": "save", "how": how})
    then = state()
    assert saved["bytes"] == files_bytes(tmp_path / "nvme" / how) > sum(t.nbytes for t in then)
    peer.sample({"what": "step", "how": how, "steps": 2})
    assert not all(map(torch.equal, then, state()))
    peer.sample({"what": "load", "how": how})
    assert all(map(torch.equal, then, state()))


def test_dropped_pages_and_bytes_are_of_all_files_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    for path, nbytes in ((tmp_path / "a", 10), (tmp_path / "folder" / "b", 30)):
        path.write_bytes(bytes(nbytes))
    dropped = []

    def fadvise(fd: int, *advice: int) -> None:
        dropped.append((os.fstat(fd).st_size, *advice))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    drop_pages(tmp_path)
    # Offset 0 and length 0: the whole file.
    whole = (0, 0, os.POSIX_FADV_DONTNEED)
    assert sorted(dropped) == [(10, *whole), (30, *whole)]
    assert files_bytes(tmp_path) == 40


def test_loads_are_after_their_pages_were_dropped(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(
        bench_checkpoint, "drop_pages", lambda path: events.append(f"drop {path.name}")
    )
    load = hetero.load
    monkeypatch.setattr(hetero, "load", lambda *a: (events.append("load"), load(*a)))
    options = train_options(model, tmp_path, policy="cpu")
    with RunFolder(str(tmp_path)) as folder, open_job(options, folder) as job:
        own = HeteroCheckpoints(job, tmp_path / "nvme")
        own.save()
        own.load()
    assert events == ["drop hetero", "load"]


@pytest.mark.parametrize(
    ("more", "fact"),
    [
        (["--rounds", "0"], "--rounds must be 1 or more"),
        (["--peers", "tourch"], "did you mean torch"),
        (["--path", "/nonexistent"], "--path /nonexistent is not a directory"),
        (["--every", "0"], "--every must be 1 or more"),
        (["--config", "/nonexistent.json"], "configuration /nonexistent.json"),
        (["--host-memory", "lots"], "lots"),
        (["--seq-len", "1"], "--seq-len must be at least 2"),
        (["--host-memory", "4KiB"], "host_memory"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    fact: str,
) -> None:
    assert main([*options, *more]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("bench.checkpoint: error: ")
    assert fact in error
    assert list((tmp_path / "nvme").iterdir()) == []
