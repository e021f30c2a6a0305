"""What save_dcp() and load_dcp() hold beside the budgets does not grow with the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
MIB = 1 << 20
HOST_MEMORY = 32 * MIB
CHUNK_NUMEL = 1 << 19
PARAM_NUMEL = 1 << 21  # of a parameter, which is a chunk of several slots
# Tiles, parts of tensors in several dtypes, and what of the budget is new.
SAVING = 32 * MIB
# Master and momentum of a chunk, one of the checkpoint's own chunks, and what of the budget is new.
LOADING = 8 * PARAM_NUMEL + 16 * MIB

_SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import hetero
from offload.memory.process_memory import peak_resident_bytes, resident_bytes

folder, host_memory, chunk_numel = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def grown_by(call):
    # The peak counts from here on.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    call()
    return peak_resident_bytes() - before

def build(numels):
    options = {"placement_policy": "nvme", "host_memory": host_memory, "nvme_path": str(folder),
               "chunk_numel": chunk_numel}
    with hetero.ZeroInitContext(dtype="bf16", **options):
        model = nn.Sequential(*[nn.Linear(1024, 2048, bias=False) for _ in range(numels)])
    return hetero.initialize(model, hetero.HybridSGD(model.parameters(), lr=0.1, momentum=0.9))

# What torch imports, and its first pickles, are no part of it.
small = build(1)
hetero.save_dcp(folder / "small", *small)
hetero.load_dcp(folder / "small", *small)
small[1].engine.close()
model, optimizer = build(24)
found = {"numel": sum(p.numel() for p in model.parameters())}
found["save"] = grown_by(lambda: hetero.save_dcp(folder / "out", model, optimizer))
found["load"] = grown_by(lambda: hetero.load_dcp(folder / "out", model, optimizer))
found["whole"] = grown_by(lambda: model.state_dict())
optimizer.engine.close()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_model_larger_than_memory_passes(tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(HOST_MEMORY), str(CHUNK_NUMEL)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, *arguments], cwd=ROOT, check=False,
        capture_output=True, text=True, timeout=300,
        # (So that what was freed does not stay in the process, which would blur the measure.)
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["numel"] * 8 > 380 * MIB  # master and momentum
    assert found["save"] <= SAVING, found
    assert found["load"] <= LOADING, found
    # The same measure shows what holds the whole model, in bf16.
    assert found["whole"] > 1.8 * found["numel"], found
