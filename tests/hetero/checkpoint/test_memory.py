"""What saves, loads and commits hold beside the budgets, whatever the size of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
HOST_MEMORY = 32 * MIB
BESIDE = 16 * MIB  # a part of a tensor in several dtypes, and what of the budget is new
BESIDE_CHECKPOINT = 48 * MIB  # the buffers of a save or a load

# argv: folder, compute dtype, dtype of the export.
_SCRIPT = """
import gc, json, sys
from pathlib import Path
import torch
from torch import nn
import hetero
from offload.memory.process_memory import peak_resident_bytes, resident_bytes

folder, compute, dtype, host_memory = Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])

def grown_by(call):
    # What an engine before has left is no part of it. The peak counts from here on.
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    call()
    return peak_resident_bytes() - before

options = {"placement_policy": "nvme", "host_memory": host_memory, "nvme_path": str(folder)}
with hetero.ZeroInitContext(dtype=compute, **options):
    model = nn.Sequential(*[nn.Linear(1024, 2048, bias=False) for _ in range(24)])
optimizer = hetero.HybridSGD(model.parameters(), lr=0.1)
model, optimizer = hetero.initialize(model, optimizer)
found = {"numel": sum(p.numel() for p in model.parameters())}
found["export"] = grown_by(lambda: hetero.save_pretrained(
    model, folder / "out", dtype=dtype, max_shard_bytes="100MB"))
found["load"] = grown_by(lambda: hetero.load_pretrained(model, folder / "out"))
found["save"] = grown_by(lambda: hetero.save(folder / "saved", model, optimizer))
found["resume"] = grown_by(lambda: hetero.load(folder / "saved", model, optimizer))
found["whole"] = grown_by(lambda: model.state_dict())
found["host"] = optimizer.engine.ledger.peak_bytes["host"]
optimizer.engine.close()
del model, optimizer

def start():
    global model, optimizer
    with hetero.ZeroInitContext(dtype=compute, durable=True, commit_every=0, **options):
        model = nn.Sequential(*[nn.Linear(1024, 2048, bias=False) for _ in range(24)])
    optimizer = hetero.HybridSGD(model.parameters(), lr=0.1)
    model, optimizer = hetero.initialize(model, optimizer)

found["start"] = grown_by(start)
optimizer.step()
found["commit"] = grown_by(lambda: hetero.commit(model, blocking=True))
optimizer.engine.close()
del model, optimizer
found["go on"] = grown_by(start)
assert hetero.resume(model) is not None
optimizer.engine.close()
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("compute", "dtype"), [pytest.param("fp32", "fp32", marks=pytest.mark.extra), ("bf16", "fp32")]
)
def test_a_model_larger_than_memory_passes(tmp_path: Path, compute: str, dtype: str) -> None:
    arguments = [str(tmp_path), compute, dtype, str(HOST_MEMORY)]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=300,
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    size = found["numel"] * 4
    assert size > 190 * MIB
    assert found["host"] <= HOST_MEMORY
    for what in ("export", "load"):
        assert found[what] <= BESIDE < size / 10, found
    # (Whether pages of the budget are new depends on those that the engine before has left.)
    assert found["go on"] <= HOST_MEMORY + BESIDE_CHECKPOINT < size / 2, found
    assert found["commit"] <= BESIDE, found
    for what in ("save", "resume"):
        assert found[what] <= BESIDE_CHECKPOINT < size / 2.9, found
    # The same measure shows what holds the whole model, in the compute dtype.
    assert found["whole"] > size / 3, found
