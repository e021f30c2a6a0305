"""`--jobs N`: tests on forks of the process that has collected them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
    import os, pathlib, pytest
    from tests.support.workers import Workers

    def pytest_configure(config):
        config.pluginmanager.register(Workers(int(os.environ["JOBS"])))

    @pytest.fixture(scope="session")
    def made(tmp_path_factory):
        yield tmp_path_factory.mktemp("made")
        pathlib.Path("ended").touch()
"""
FAILS = """
    import os, warnings

    def test_passes(made):
        assert made.parent.name.startswith("worker-")
        warnings.warn("be careful")

    def test_fails(made):
        print("this was said")
        os.system("echo this was said by another process")
        assert [1] == [2], "they differ"
"""
DIES = """
    import os, signal
    def test_passes(made): pass
    def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
    def test_is_lost(): pass
"""
PASSES = "def test_passes(): pass"


def run(folder: Path, jobs: int, *arguments: str, **files: str) -> tuple[int, str]:
    """Pytest's exit status, and what it prints, of files of tests by their names."""
    for name, text in {"conftest": CONFTEST, **files}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    (folder / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JOBS": str(jobs)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=folder)
    return done.returncode, done.stdout


def test_all_that_tests_say_is_reported(tmp_path: Path) -> None:
    files = {"test_a": FAILS, "test_b": DIES, "test_c": PASSES}
    status, said = run(tmp_path, 2, "--durations=0", "-vv", **files)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 3 passed, 1 warning in" in said
    for part in ("assert [1] == [2]", "they differ", "this was said", "said by another process"):
        assert part in said
    assert "FAILED test_b.py::test_dies" in said
    assert "the process of this test ended with -9" in said
    assert "UserWarning: be careful" in said
    assert re.search(r"s call +test_a.py::test_passes", said)
    assert (tmp_path / "ended").exists()


def test_nothing_is_begun_after_the_first_failure(tmp_path: Path) -> None:
    status, said = run(tmp_path, 1, "-x", test_a=FAILS, test_c=PASSES)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in said
    assert "1 failed, 1 passed" in said
    assert (tmp_path / "ended").exists()


def test_what_cannot_be_collected_is_told(tmp_path: Path) -> None:
    status, said = run(tmp_path, 2, test_a="import no_such_module", test_c=PASSES)
    assert status == pytest.ExitCode.INTERRUPTED
    assert "No module named 'no_such_module'" in said
