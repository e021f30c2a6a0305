"""Tests of a true CUDA device: skipped where there is none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Before CUDA starts: products then give the same bits from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from offload.device.cuda_backend import cuda_available
from offload.device.cuda_runtime import CudaRuntime

_HERE = Path(__file__).parent
# Some versions of torch keep cuBLASLt's workspace, of 32 MiB on Hopper, when they clear cuBLAS's.
_WORKSPACE_BYTES = 64 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.cuda)
            if not cuda_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes each outcome as a JSON line at once: whoever is killed leaves what it has found."""
    results = os.environ.get("HETERO_TEST_RESULTS")
    if results is None or "PYTEST_XDIST_WORKER" in os.environ:  # who controls workers gets all
        return
    if report.when != "call" and report.outcome == "passed":
        return
    line = {
        "test": report.nodeid.removeprefix("tests/cuda/"),
        "when": report.when,
        "outcome": report.outcome,
        "seconds": round(report.duration, 3),
        "text": report.longreprtext[-6000:],
    }
    with open(results, "a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture
def runtime() -> CudaRuntime:
    return CudaRuntime()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels whose bits are the same from run to run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def nothing_on_the_device() -> Iterator[None]:
    """Fails if a test leaves tensors on the device."""
    if not cuda_available():
        yield
        return
    import gc

    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= before + _WORKSPACE_BYTES
