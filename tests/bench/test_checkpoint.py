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
from bench.checkpoint import HeteroCheckpoints
from bench.peers.checkpoint import CheckpointPeer
from bench.peers.timing import MemoryAbove, drop_pages, steps_beside, with_rate
from bench.train import write_workload
from bench.work import bandwidths, job_steps
from hetero.job.job import open_job
from hetero.job.options import TrainOptions
from hetero.job.run_folder import RunFolder
from tests.support.training.loops import SMALLEST_MODEL

MODEL = {**SMALLEST_MODEL, "n_layer": 4, "n_embd": 64}
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


def bytes_of(folder: Path) -> float:
    return with_rate({"s": 1.0}, folder)["bytes"]


def train_options(model: str, tmp_path: Path, **more: Any) -> TrainOptions:
    return TrainOptions(
        config=model, data=str(tmp_path / "text"), seq_len=16, batch_size=1, clip=0.0, **more
    )


def test_without_nvme_a_save_only_writes(model: str, tmp_path: Path) -> None:
    options = train_options(model, tmp_path, policy="cpu")
    with RunFolder(str(tmp_path)) as folder, open_job(options, folder) as job:
        own = HeteroCheckpoints(job, tmp_path / "nvme")
        saved, loaded = own.save(), own.load()
        assert own.read_share == {"save": 0.0, "load": 1.0}
    assert saved["written_bytes"] == saved["bytes"] == bytes_of(tmp_path / "nvme")
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
        states = peer.peer.optimizer.state.values()
        moments = [s[key].clone() for s in states for key in ("exp_avg", "exp_avg_sq", "step")]
        return [*(p.detach().clone() for p in peer.peer.model.parameters()), *moments]

    saved = peer.sample({"what": "save", "how": how})
    then = state()
    assert saved["bytes"] == bytes_of(tmp_path / "nvme" / how) > sum(t.nbytes for t in then)
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
    assert bytes_of(tmp_path) == 40


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
