"""The same bits from every instruction set, here and on 64-bit ARM; the build without liburing.

tests/native/digest runs all kernels of all instruction sets of a machine, without Python; it is
built from the objects of the extension, with the flags of the extension.
"""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

import pytest

from offload import _native
from tests.support.native.native_build import ROOT, build_extension, build_program, succeed
from tests.support.training.loops import batches, build, train

CROSS_COMPILERS = ["aarch64-linux-gnu-g++", *(f"aarch64-linux-gnu-g++-{n}" for n in range(11, 16))]


def digests(command: list[str]) -> dict[str, dict[str, str]]:
    """Instruction set -> kernel -> digest."""
    found: dict[str, dict[str, str]] = {}
    for line in succeed(command).splitlines():
        isa, kernel, digest = line.split()
        found.setdefault(isa, {})[kernel] = digest
    return found


@pytest.fixture(scope="module")
def here() -> dict[str, dict[str, str]]:
    program = build_program("digest-host", "digest", HETERO_IO_URING="OFF")
    return digests([str(program / "tests" / "native" / "digest" / "digest")])


@pytest.mark.extra
def test_every_instruction_set_has_the_same_digests(here: dict[str, dict[str, str]]) -> None:
    assert list(here) == _native.isa_available()
    kinds = 6 * 3 * 3 * 3  # rules, dtypes, gradient dtypes, state dtypes
    assert sum(kernel.startswith("update-") for kernel in here["scalar"]) == kinds
    # Two kernels that compute different things do not share a digest, or it digests nothing.
    assert len(set(here["scalar"].values())) == len(here["scalar"])
    for isa, found in here.items():
        assert found == here["scalar"], isa


@pytest.mark.extra
def test_arm_has_the_same_digests(here: dict[str, dict[str, str]]) -> None:
    if not any(map(shutil.which, CROSS_COMPILERS)):
        pytest.skip("no aarch64-linux-gnu-g++; on Debian and Ubuntu: g++-aarch64-linux-gnu")
    toolchain = ROOT / "tests" / "native" / "digest" / "aarch64.cmake"
    program = build_program(
        "digest-aarch64", "digest", HETERO_IO_URING="OFF", CMAKE_TOOLCHAIN_FILE=str(toolchain)
    )
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("compiled, but there is no qemu-aarch64 to run it; on Debian: qemu-user")
    there = digests([emulator, str(program / "tests" / "native" / "digest" / "digest")])
    assert list(there) == ["neon", "scalar"]
    for isa, found in there.items():
        assert found == here["scalar"], isa


@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(other, marks=pytest.mark.extra) for other in ("fp16", "fp32"))]
)
def test_training_has_the_same_bits_with_every_instruction_set(dtype: str, tmp_path: Path) -> None:
    """On disk, under a small budget."""
    options = {"placement_policy": "nvme", "nvme_path": str(tmp_path), "host_memory": "400KiB"}
    runs = []
    isas = _native.isa_available()
    assert len(isas) > 1 or platform.machine() not in ("x86_64", "aarch64")
    for isa in (isas[0], isas[-1]):  # (Kernel by kernel all are compared in update/.)
        _native.set_isa(isa)
        model, optimizer = build(dtype=dtype, initial_loss_scale=256.0, **options)
        runs.append(train(model, optimizer, batches(4), accumulate=2, clip=1.0))
    assert runs[0].same_bits(runs[1])


@pytest.mark.extra
def test_without_liburing_it_builds_and_transfers() -> None:
    shadow = build_extension("without-uring", {"HETERO_IO_URING": "OFF"})
    inside = ["env", f"--chdir={shadow}", f"PYTHONPATH={shadow}", sys.executable]
    built = succeed([*inside, "-c", "from offload import _native; print(_native.build_info())"])
    assert "'liburing': None" in built
    tests = ["tests/native/io", "tests/native/pipeline/test_step_pipeline.py"]
    tests += ["tests/native/pipeline/test_step_pipeline_end.py"]
    tests += ["tests/offload", "tests/whole/test_parity.py"]
    succeed([*inside, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests])
