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
from bench import io as bench_io
from bench.checkpoint import HeteroCheckpoints, of_beside
from bench.peers.checkpoint import CheckpointPeer
from bench.peers.timing import MemoryAbove, drop_pages, steps_beside, with_rate
from bench.train import write_workload
from bench.work import job_steps
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
    monkeypatch.setattr(bench_io, "DISK_WINDOW_S", 0.01)
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
        model=model, data=str(tmp_path / "text"), seq_len=16, batch_size=1, clip=0.0, **more
    )


def test_what_a_save_and_a_load_move(model: str, tmp_path: Path) -> None:
    """Of 12 bytes a parameter those are read that no buffer and no home in RAM has, and the disk is
    measured with that proportion."""
    in_ram, shares = 1200 << 10, []

    def disk(read_share: float) -> dict[str, float]:
        shares.append(read_share)
        return {"gbps": 1.0}

    options = train_options(model, tmp_path, policy="nvme", host_memory=str(in_ram))
    with RunFolder(str(tmp_path)) as folder, open_job(options, folder) as job:
        own = HeteroCheckpoints(job, tmp_path / "nvme", disk)
        own.warm_up()
        found, params = own.sample(1), job.setting.params
    assert found["save_written_bytes"] >= found["save_bytes"] > STATE_BYTES * params
    assert found["load_read_bytes"] >= found["load_bytes"]
    save_reads = found["save_read_bytes"]
    assert shares[0] == save_reads / (save_reads + found["save_written_bytes"])
    assert found["steps"] >= 1
    assert STATE_BYTES * params - in_ram <= save_reads <= STATE_BYTES * params * 1.1


def test_losses_are_those_of_a_round() -> None:
    made = {"hetero": {"pause_s": 0.5, "steps": 2, "step_s": 1.5, "alone_step_s": 1.0}}
    found = of_beside("hetero", made)
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
    assert found["beside_s"] >= found["pause_s"]


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


@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_what_a_peer_loads_is_what_it_saved(way: str, model: str, tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    write_workload(train_options(model, tmp_path, steps=3, threads=1), folder / "workload.json")
    threads = torch.get_num_threads()
    try:
        peer = CheckpointPeer(folder, way)
    finally:
        torch.set_num_threads(threads)

    def state() -> list[torch.Tensor]:
        states = peer.peer.optimizer.state.values()
        moments = [s[key].clone() for s in states for key in ("exp_avg", "exp_avg_sq", "step")]
        return [*(p.detach().clone() for p in peer.peer.model.parameters()), *moments]

    peer.step()
    peer.path.mkdir()
    peer.save()
    then = state()
    assert bytes_of(peer.path) > sum(t.nbytes for t in then)
    peer.step()
    assert not all(map(torch.equal, then, state()))
    peer.load()
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
        HeteroCheckpoints(job, tmp_path / "nvme", lambda _: {"gbps": 1.0}).sample(1)
    assert events == ["drop hetero", "load"]
