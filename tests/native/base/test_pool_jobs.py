"""native/worker_pool: its queue of jobs, with calls that wait for each other at gates."""

import shutil
from pathlib import Path

import pytest

from tests.native.test_sanitizers import SANITIZERS, missing
from tests.support.native.native_build import ROOT, build_program, cached, succeed

BUILDS = ["address", pytest.param("thread", marks=pytest.mark.extra)]


@pytest.fixture(scope="module", params=BUILDS)
def program(request: pytest.FixtureRequest) -> Path:
    """The test program, with sanitizers, which see all of it, where there are any."""
    has_none = missing(SANITIZERS[request.param])
    name = "pool" if has_none else f"pool-{request.param}"
    flags = "" if has_none else SANITIZERS[request.param].flags

    def make(target: Path) -> None:
        folder = build_program(name, "pool", HETERO_SANITIZE=flags)
        shutil.copy2(folder / "tests" / "native" / "pool" / "pool", target)

    files = [*(ROOT / "native" / "base").iterdir(), *(ROOT / "tests" / "native" / "pool").iterdir()]
    return cached(name, [flags], sorted([ROOT / "CMakeLists.txt", *files]), make)


def test_jobs(program: Path) -> None:
    succeed([str(program)])
