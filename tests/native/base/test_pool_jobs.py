"""native/worker_pool: its queue of jobs, with calls that wait for each other at gates."""

from pathlib import Path

import pytest

from tests.native.test_sanitizers import SANITIZERS, missing
from tests.support.native.native_build import build_program, succeed

BUILDS = ["address", pytest.param("thread", marks=pytest.mark.extra)]


@pytest.fixture(scope="module", params=BUILDS)
def program(request: pytest.FixtureRequest) -> Path:
    """The test program, with sanitizers, which see all of it, where there are any."""
    has_none = missing(SANITIZERS[request.param])
    name = "pool" if has_none else f"pool-{request.param}"
    flags = "" if has_none else SANITIZERS[request.param].flags
    folder = build_program(name, "pool", HETERO_SANITIZE=flags)
    return folder / "tests" / "native" / "pool" / "pool"


def test_jobs(program: Path) -> None:
    succeed([str(program)])
