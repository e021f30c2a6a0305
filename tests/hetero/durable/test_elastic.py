"""torchrun restarts ranks, and a loop with a durable state goes on from its last commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.durable import elastic_loop

ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, steps: int, killed_step: int) -> list[torch.Tensor]:
    """The masters in the end, of two ranks."""
    launch = ["--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.support.durable.elastic_loop"]
    arguments = [str(folder), str(steps), str(killed_step)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: list[torch.Tensor] = torch.load(folder / "masters.pt")
    return found


@pytest.mark.usefixtures("quick_python")
def test_the_documented_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is killed, and both go on; then one rank, this process, goes on alone."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    found = run(killed, 6, 4)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RESTART_COUNT", "0")):
        monkeypatch.setenv(name, value)
    elastic_loop.main(whole, 6, 0)  # (two ranks with the same data have the same numbers)
    assert all(map(torch.equal, found, torch.load(whole / "masters.pt")))
    elastic_loop.main(killed, 8, 0)
    begins = [json.loads(line) for line in (killed / "begins").read_text().splitlines()]
    assert begins[0] in ([3, 2], [4, 2])  # (the commit of the step before may have been under way)
    assert begins[1] == [6, 1]
