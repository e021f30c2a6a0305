"""Training on a device whose type is not "cpu": the bits of plain PyTorch on that device.

It is a device of the tests' own over PrivateUse1 (tests/native/torch_device), so that what depends
on a tensor's device is executed without a GPU: autocast, pinned RAM, generators, autograd's thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.native import torch_device
from tests.support.ranks.processes import run_forked
from tests.support.training import on_device
from tests.support.training.on_device import Case

pytestmark = pytest.mark.skipif(
    torch_device.MISSING is not None, reason=torch_device.MISSING or "has a C++ compiler"
)

CPU = {"placement_policy": "cpu"}
NVME = {"placement_policy": "nvme", "host_memory": "1MiB"}
AUTO = {"placement_policy": "auto", "device_memory": "1200KiB", "host_memory": "1MiB"}
ALL_THERE = {"placement_policy": "cuda", "device_memory": "64MiB"}
ACTIVATIONS = {"activation_memory": "300KiB", "device_memory": "1MiB"}
AGAIN = {"activation_memory": "64MiB", "device_memory": "64MiB", "recompute": "all"}
UNSCALED = {"initial_loss_scale": None}
CAST = {"dtype": "fp32", "autocast": torch.bfloat16}


@pytest.fixture(scope="module")
def library() -> Path:
    return torch_device.build()


@pytest.mark.parametrize("runtime", torch_device.RUNTIMES)
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        pytest.param(CPU, {}, id="cpu"),
        pytest.param(CPU | AGAIN, {"accumulate": 2}, id="cpu-recompute"),
        pytest.param(CPU | AGAIN, CAST, id="cpu-recompute-autocast"),
        pytest.param(NVME | ACTIVATIONS, {}, id="nvme-activations"),
        pytest.param(
            NVME | ACTIVATIONS | {"recompute": "auto"}, {"tiled": True}, id="nvme-recompute-tiled"
        ),
        pytest.param(ACTIVATIONS | AUTO, CAST | {"tiled": True}, id="auto-autocast-tiled"),
        pytest.param(ALL_THERE, CAST, id="all-on-device-autocast"),
    ],
)
def test_the_bits_of_plain_torch(
    settings: dict[str, Any], more: dict[str, Any], runtime: str, library: Path, tmp_path: Path
) -> None:
    run_forked(
        on_device.check_same_bits, Case(library, tmp_path, settings, runtime=runtime, **more)
    )


@pytest.mark.parametrize(
    "settings", [CPU, NVME | ACTIVATIONS, ALL_THERE], ids=["cpu", "nvme", "all"]
)
def test_what_is_loaded_goes_on(settings: dict[str, Any], library: Path, tmp_path: Path) -> None:
    run_forked(on_device.check_going_on, Case(library, tmp_path, settings))


def test_a_scaler_of_the_device(library: Path, tmp_path: Path) -> None:
    run_forked(on_device.check_scaler, Case(library, tmp_path, CPU | UNSCALED, "fp16"))


@pytest.mark.parametrize("settings", [CPU, ALL_THERE], ids=["cpu", "all"])
def test_uses_of_values(settings: dict[str, Any], library: Path, tmp_path: Path) -> None:
    run_forked(on_device.check_uses, Case(library, tmp_path, settings))


def test_a_recorder_waits_for_the_device(library: Path, tmp_path: Path) -> None:
    run_forked(on_device.check_recorder, Case(library, tmp_path, CPU))
