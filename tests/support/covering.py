"""A selection of the cases of a product, in which all that can fail by itself occurs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence


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
