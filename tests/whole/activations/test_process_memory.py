"""process_memory holds for the whole process from the first step on, and changes no bit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.python_process import run_python

pytestmark = pytest.mark.usefixtures("nothing_left")

MIB = 1 << 20
# Of 1,024 tokens the blocks save some 300 MiB in fp32, beside 280 MiB of Python and torch; they are
# narrow, because the time goes with the square of their width, and sequences are short, because it
# does with the square of their length. (In bf16 the products take minutes on a CPU that has none.)
CHILD = """
import json, resource, sys
path, limit, data, group = json.loads(sys.argv[1])
if group:
    with open(group + "/cgroup.procs", "w") as file:
        file.write("0")
if data:
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
import torch
import hetero
from bench.work.gpt import Gpt, Shape, fill, quick_init
from offload.memory.process_memory import peak_resident_bytes
torch.set_num_threads(1)
options = {} if limit is None else {"process_memory": limit}
with hetero.ZeroInitContext(
    placement_policy="auto", nvme_path=path, dtype="fp32", **options
):
    with quick_init():
        model = Gpt(Shape(20, 192, 6, 256, 4), 1024)
    fill(model)
model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-3))
tokens = torch.randint(0, 1024, (4, 256), generator=torch.Generator().manual_seed(1))
losses, peaks = [], []
for _ in range(2):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the kernel's peak begins anew
    loss = model(tokens)
    loss.backward()
    losses.append(loss.item())
    del loss
    optimizer.step()
    optimizer.zero_grad()
    peaks.append(peak_resident_bytes())
print(json.dumps([losses, peaks, optimizer.engine.traffic.activations_written]))
optimizer.engine.close()
"""


def train(
    path: Path, limit: int | str | None, data: int = 0, group: str = ""
) -> tuple[list[float], list[int], int]:
    """Losses and peaks of steps, and bytes of activations that were written."""
    losses, peaks, written = json.loads(
        run_python("-c", CHILD, json.dumps([str(path), limit, data, group]))
    )
    return losses, peaks, written


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[int], int]:
    return train(tmp_path_factory.mktemp("unlimited"), None)


LIMIT = 440 * MIB


def test_every_step_stays_within(tmp_path: Path, unlimited: Any) -> None:
    """Also where the system refuses what is beyond twice the limit, addresses included."""
    assert min(unlimited[1]) > LIMIT * 5 // 4
    losses, peaks, _ = train(tmp_path, LIMIT, data=2 * LIMIT)
    assert losses == unlimited[0]
    assert max(peaks) <= LIMIT, [peak / MIB for peak in peaks]


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


@pytest.mark.extra
def test_a_cgroup_s_limit_is_kept(tmp_path: Path, unlimited: Any) -> None:
    """The group counts pages of files, too, which the kernel gives up first."""
    with cgroup(LIMIT) as group:
        losses, _, _ = train(tmp_path, "auto", group=group)
    assert losses == unlimited[0]
