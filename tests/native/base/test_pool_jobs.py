"""native/worker_pool: its queue of jobs, with calls that wait for each other at gates."""

from pathlib import Path

import pytest

from tests.native.test_sanitizers import SANITIZERS, missing
from tests.support.native.native_build import CXX, ROOT, cached, succeed

BUILDS = ["address", pytest.param("thread", marks=pytest.mark.extra)]
FLAGS = ["-std=c++20", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-DHETERO_CHECKS"]


@pytest.mark.parametrize("sanitizer", BUILDS)
def test_jobs(sanitizer: str) -> None:
    """With sanitizers, which see all of the program, where there are any."""
    flags = list(FLAGS)
    if not missing(SANITIZERS[sanitizer]):
        flags += [f"-fsanitize={SANITIZERS[sanitizer].flags}", "-fno-sanitize-recover=all"]
    base = ROOT / "native" / "base"
    program = ROOT / "tests" / "native" / "pool" / "pool.cpp"
    sources = [program, *(base / f"{name}.cpp" for name in ("fork", "timeline", "worker_pool"))]
    command = [CXX, *flags, f"-I{ROOT / 'native'}", *map(str, sources)]

    def make(target: Path) -> None:
        succeed([*command, "-o", str(target)])

    read = sorted([program, *base.iterdir()])
    succeed([str(cached(f"pool-{sanitizer}", flags, read, make))])
