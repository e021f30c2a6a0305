"""Which cases of products `make test` runs, and the order of files: the longest come first.

Workers take a file at a time, so a long one that starts late would run alone in the end.
`make test ARGS=--record-seconds` writes how long files take to tests/seconds.txt.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import pytest

SECONDS = Path(__file__).parents[1] / "seconds.txt"
_SHORT_S = 5  # what takes less is not in the list


def recorded_seconds(text: str) -> dict[str, int]:
    """Seconds by file of a list that Recorder has written."""
    pairs = (line.split() for line in text.splitlines())
    return {file: int(seconds) for seconds, file in pairs}


def longest_first(items: list[pytest.Item]) -> None:
    """Files in the order of the list; then the others, in the order that they have."""
    seconds = recorded_seconds(SECONDS.read_text())
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 0))


class Recorder:
    """Adds up how long the tests of each file take, and writes the list if all have passed."""

    def __init__(self, path: Path = SECONDS) -> None:
        self._path = path
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_file(report.nodeid)] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK:
            long = [(s, file) for file, s in self._seconds.most_common() if s >= _SHORT_S]
            self._path.write_text("".join(f"{s:.0f} {file}\n" for s, file in long))


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def covering(cases: Sequence[Mapping[str, Sequence[object]]], strength: int, turn: int) -> set[int]:
    """Indices of some of the `cases`, each the values along every axis, in which each `strength`
    values along different axes that meet in a case do so.

    Of cases that add as much, that goes first whose values were taken least, and then by turns: so
    products of the same axes with another `turn` have other cases.
    """
    values = [[(name, tuple(map(_key, case[name]))) for name in sorted(case)] for case in cases]
    tuples = [set(itertools.combinations(each, min(strength, len(each)))) for each in values]
    missing = set().union(*tuples)
    taken: Counter[tuple[str, Hashable]] = Counter()
    chosen: set[int] = set()
    order = [(turn + number) % len(cases) for number in range(len(cases))]
    while missing:
        best = max(
            order, key=lambda n: (len(tuples[n] & missing), -sum(taken[each] for each in values[n]))
        )
        chosen.add(best)
        missing -= tuples[best]
        taken.update(values[best])
    return chosen


def _key(value: object) -> Hashable:
    """What is another value is another object, but for literals."""
    return value if isinstance(value, (str, int, float)) else id(value)
