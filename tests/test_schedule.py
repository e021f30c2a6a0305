"""Files of tests that take longest start first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.schedule import SECONDS, Recorder, longest_first, recorded_seconds


def test_files_that_are_listed_come_first_and_tests_stay_in_order() -> None:
    slow, slower = reversed(list(recorded_seconds(SECONDS.read_text()))[:2])
    names = ["a.py::x", f"{slow}::b", f"{slow}::a", "b.py::x", f"{slower}::x"]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    longest_first(items)
    assert [item.nodeid for item in items] == [names[i] for i in (4, 1, 2, 0, 3)]


@pytest.mark.parametrize("passed", [True, False])
def test_a_run_that_passes_is_recorded(passed: bool, tmp_path: Path) -> None:
    path = tmp_path / "seconds.txt"
    recorder = Recorder(path)
    for nodeid, seconds in (("a.py::x", 4.0), ("b.py::x", 9.0), ("c.py::x", 1.0), ("a.py::y", 7.4)):
        report: Any = SimpleNamespace(nodeid=nodeid, duration=seconds)
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish(pytest.ExitCode.OK if passed else pytest.ExitCode.TESTS_FAILED)
    assert path.exists() == passed
    if passed:
        assert recorded_seconds(path.read_text()) == {"a.py": 11, "b.py": 9}
