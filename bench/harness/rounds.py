"""Contenders that take turns within one run, so that a slow minute of the machine hits all alike.

Vocabulary: a *sample* is what one contender measured in one turn, under the names of its metrics.
A *round* gives every contender one turn; each round begins one contender later than the one before.
The first round is a warm-up and is left out. A *ratio* of two contenders is taken within each round
and its median given: a drift of the machine between rounds cancels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.harness.program import tell

Sample = Mapping[str, float]


class ContenderError(Exception):
    """A contender cannot be measured; it is left out with this reason and the others go on."""


class MissingError(ContenderError):
    """A contender cannot be measured because it is not installed."""


@dataclass
class Rounds:
    """The samples of all contenders; index r of each list is the same round.

    `failed` has the reason of each contender that was left out; its samples are dropped, because
    rounds in which it did not take part would not be comparable. `missing` are those of them that
    are not installed.
    """

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    def values(self, contender: str, metric: str) -> list[float]:
        """One value per round. Raises KeyError for an unknown contender or metric."""
        return [sample[metric] for sample in self.samples[contender]]

    def median(self, contender: str, metric: str) -> float:
        """Over the rounds."""
        return statistics.median(self.values(contender, metric))

    def spread(self, contender: str, metric: str) -> dict[str, float]:
        """{"median", "min", "max"} over the rounds."""
        values = self.values(contender, metric)
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    def derive(self, contender: str, find: Callable[[Mapping[str, Sample]], Sample]) -> None:
        """Adds to the contender's samples what `find` makes of all samples of the same round."""
        for number, sample in enumerate(self.samples[contender]):
            made = {name: samples[number] for name, samples in self.samples.items()}
            self.samples[contender][number] = {**sample, **find(made)}

    def compare(self, base: str, metric: str, name: str) -> None:
        """Adds to the samples that have `metric` its ratio to that of `base`, as `name`."""
        for contender, samples in self.samples.items():
            if base in self.samples and all(metric in sample for sample in samples):
                self.derive(
                    contender,
                    lambda made, own=contender: {name: made[own][metric] / made[base][metric]},  # type: ignore[misc]
                )

    def figures(self) -> dict[str, dict[str, dict[str, float]]]:
        """The spread of each metric that a contender has in all rounds."""
        return {
            name: {
                metric: self.spread(name, metric)
                for metric in samples[0]
                if all(metric in sample for sample in samples)
            }
            for name, samples in self.samples.items()
        }


def run_rounds(
    contenders: Mapping[str, Callable[[], Sample]],
    rounds: int,
    tell: Callable[[str], None] = tell,
    warm_up: bool = True,
) -> Rounds:
    """Measures every contender once per round, `rounds` times after one round of warm-up.

    `contenders` maps names to functions that take one sample. A function that raises
    ContenderError is not called again; any other exception ends the run. `tell` gets progress in
    lines (default: to stderr). Without `warm_up` the first round counts, too. Raises ValueError for
    less than one round or no contender.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be 1 or more, got {rounds}")
    if not contenders:
        raise ValueError("there is no contender to measure")
    names = list(contenders)
    result = Rounds(samples={name: [] for name in names})
    for number in range(0 if warm_up else 1, rounds + 1):
        label = f"round {number}/{rounds}" if number else "warm-up"
        first = (number if warm_up else number - 1) % len(names)
        for name in names[first:] + names[:first]:
            if name in result.failed:
                continue
            try:
                sample = contenders[name]()
            except ContenderError as error:
                result.failed[name] = str(error)
                if isinstance(error, MissingError):
                    result.missing.add(name)
                del result.samples[name]
                tell(f"{label}  {name}: left out: {error}")
                continue
            tell(f"{label}  {name}: " + "  ".join(f"{k} {v:.4g}" for k, v in sample.items()))
            if number:
                result.samples[name].append(sample)
    return result
