"""Which factor clipping and unscaling are going to give gradients, guessed from recent steps."""

from __future__ import annotations

from collections import Counter, deque

_STEPS = 8  # that are remembered
# Of them so many must have had the factor. An update that has to be made again costs compute and
# bandwidth that backward has to spare, mostly; one that was not made early costs its whole time.
LEAST_SHARE = 0.5


class FactorPrediction:
    """Guesses the factor by which gradients are multiplied between backward and step().

    Without clipping it is 1, with a GradScaler one over its scale, which seldom changes. Clipping
    gives 1 where the norm is small enough, and else a number that does not come again.
    """

    def __init__(self, always: bool) -> None:
        """`always`: guess whatever recent steps say."""
        self._always = always
        self._recent: deque[float | None] = deque(maxlen=_STEPS)

    def guess(self) -> float | None:
        """The factor; None if a guess would be wrong too often."""
        found = Counter(
            f for f in self._recent if f is not None and (f == 1.0 or self._recent.count(f) > 1)
        )
        factor, count = found.most_common(1)[0] if found else (1.0, 0)
        if self._always or count >= max(1, LEAST_SHARE * len(self._recent)):
            return factor
        return None

    def note(self, factor: float | None) -> None:
        """A step was made, with this factor of all gradients; None if a guess could not help:
        factors differed, or what was updated early had to be taken back for another reason."""
        self._recent.append(factor)
