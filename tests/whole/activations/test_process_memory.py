"""process_memory holds for the whole process from the first step on, and changes no bit."""

from __future__ import annotations

import json
import resource
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from bench.work.gpt import Gpt, Shape, fill, quick_init
from offload.memory.process_memory import peak_resident_bytes, resident_bytes
from tests.support.python_process import run_python
from tests.support.ranks.processes import run_forked

pytestmark = pytest.mark.usefixtures("nothing_left")

MIB = 1 << 20
BESIDE = 110 * MIB  # of the limit, beside what a process holds before
# Of 1,024 tokens the blocks save some 150 MiB in fp32; they are narrow, because the time goes with
# the square of their width, and sequences are short, because it does with the square of their
# length. (In bf16 the products take minutes on a CPU that has none.)
SHAPE = Shape(10, 192, 6, 256, 4)


def train(path: Path, limit: str) -> tuple[list[float], list[int]]:
    """Losses of steps, and the bytes that each had at most beside what this process held before.

    `limit`: "BESIDE" these, beyond twice which the system refuses memory, addresses included;
    "auto", of the control group; or none.
    """
    torch.set_num_threads(1)
    held = resident_bytes()
    options: dict[str, Any] = {"process_memory": limit} if limit else {}
    if limit == "BESIDE":
        options["process_memory"] = held + BESIDE
        twice = 2 * options["process_memory"]
        resource.setrlimit(resource.RLIMIT_DATA, (twice, twice))
    with hetero.ZeroInitContext(
        placement_policy="auto", nvme_path=str(path), dtype="fp32", **options
    ):
        with quick_init():
            model = Gpt(SHAPE, 1024)
        fill(model)
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-3))
    tokens = torch.randint(0, 1024, (4, 256), generator=torch.Generator().manual_seed(1))
    losses, peaks = [], []
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak begins anew
        loss = model(tokens)
        loss.backward()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(peak_resident_bytes() - held)
    optimizer.engine.close()
    return losses, peaks


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[int]]:
    found: tuple[list[float], list[int]] = run_forked(train, tmp_path_factory.mktemp("nvme"), "")
    return found


def test_every_step_stays_within(tmp_path: Path, unlimited: Any) -> None:
    assert min(unlimited[1]) > BESIDE * 3 // 2
    losses, peaks = run_forked(train, tmp_path, "BESIDE")
    assert losses == unlimited[0]
    assert max(peaks) <= BESIDE, [peak / MIB for peak in peaks]


@contextmanager
def cgroup(limit: int) -> Iterator[str]:
    """A group whose processes the kernel kills if they hold more; skips where none can be made."""
    name = f"hetero-test-{uuid.uuid4().hex[:8]}"
    for base, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = base / name
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / file).write_text(str(limit))
                yield str(folder)
                return
            finally:
                with suppress(OSError):
                    folder.rmdir()
    pytest.skip("no cgroup can be made here")


JOINS = """
import json, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from tests.whole.activations.test_process_memory import train
print(json.dumps(train(Path(sys.argv[2]), "auto")))
"""


@pytest.mark.extra
def test_a_cgroup_s_limit_is_kept(tmp_path: Path, unlimited: Any) -> None:
    """The group counts pages of files, too, which the kernel gives up first."""
    with cgroup(420 * MIB) as group:  # of which Python and torch have 300
        losses, _ = json.loads(run_python("-c", JOINS, group, str(tmp_path)))
    assert losses == unlimited[0]
