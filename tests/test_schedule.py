"""What `make test` leaves out of products, and the order of files."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.schedule import SECONDS, Recorder, covering, longest_first, recorded_seconds


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    strength=st.integers(1, 3),
    turn=st.integers(0, 1 << 32),
)
def test_all_that_can_meet_does(lengths: list[int], strength: int, turn: int) -> None:
    """And no case is chosen that adds nothing."""
    cases = [
        {str(axis): (value,) for axis, value in enumerate(values)}
        for values in itertools.product(*map(range, lengths))
    ]

    def tuples(numbers: set[int]) -> set[tuple[object, ...]]:
        each = (itertools.combinations(cases[n].items(), strength) for n in numbers)
        return set(itertools.chain.from_iterable(each))

    chosen = covering(cases, strength, turn)
    if strength > len(lengths):
        assert chosen == set(range(len(cases)))
    else:
        assert tuples(chosen) == tuples(set(range(len(cases))))
        assert len(chosen) <= len(tuples(chosen))


def test_products_of_the_same_axes_take_turns() -> None:
    cases = [{"place": (p,), "overlap": (o,)} for p in "abcde" for o in "vwxyz"]
    met = set().union(*(covering(cases, 1, turn) for turn in range(25)))
    assert len(covering(cases, 1, 0)) == 5
    assert len(met) == 25


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
