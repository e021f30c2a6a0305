"""Which of a forward's calls of blocks are computed again in backward: a pure function.

What a block saves for backward can be kept where compute happens, can leave for slower memory and
come back, or need not be there because backward computes the block's forward again from its input.
The first costs room, the second transfers, the third compute. Transfers go on beside compute, so as
long as they are not what a step waits for they are free, and from there on compute is.

A micro-batch is expected to take

    forward  = max(computing, leaving / rate)
    backward = max(computing + what is computed again, leaving / rate)
    both     = max(forward + backward, (2 leaving + other traffic) / rate)

where `leaving` is what blocks save, and what the rest of the model saves beside them, less what has
room. Costs are taken to be in proportion to the input's bytes, which attention without a fused
kernel is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

_MOST_COUNTS = 128  # that are compared


@dataclass(frozen=True)
class CallCost:
    """What one call of a block costs.

    Attributes:
        saved_bytes: what it saves for backward if it is not computed again, its input included as
            far as nothing else has saved that.
        input_bytes: what is saved if it is.
        forward_s: seconds to compute it once.
        size_bytes: of its input; what other inputs cost is reckoned from that.
        is_repeatable: whether it can be computed again.
    """

    saved_bytes: int
    input_bytes: int
    forward_s: float
    size_bytes: int = 0
    is_repeatable: bool = True

    def times(self, share: float) -> CallCost:
        """For an input of so many times the bytes."""
        return CallCost(
            int(self.saved_bytes * share),
            int(self.input_bytes * share),
            self.forward_s * share,
            int(self.size_bytes * share),
            self.is_repeatable,
        )


@dataclass(frozen=True)
class StepRates:
    """What limits one micro-batch.

    Attributes:
        forward_s, backward_s: of compute alone, without anything being computed again.
        bytes_per_s: of activations that leave, or come back.
        other_bytes: what a micro-batch moves beside them on the same way, model state above all.
    """

    forward_s: float
    backward_s: float
    bytes_per_s: float
    other_bytes: float

    def times(self, share: float) -> StepRates:
        """For inputs of so many times the bytes: model state moves as before."""
        return replace(self, forward_s=self.forward_s * share, backward_s=self.backward_s * share)


@dataclass(frozen=True)
class Choice:
    """What becomes of the calls of one forward.

    Attributes:
        recomputed: by call, whether it is computed again.
        leaving_bytes: of what leaves for slower memory, and comes back.
        micro_batch_s: what a micro-batch is expected to take; None: nothing is known yet.
        is_possible: whether what cannot be kept has a place to go.
    """

    recomputed: tuple[bool, ...]
    leaving_bytes: int
    micro_batch_s: float | None
    is_possible: bool = True

    @property
    def count(self) -> int:
        """How many calls are computed again."""
        return sum(self.recomputed)


def choose(
    calls: Sequence[CallCost], kept_bytes: int, away_bytes: int | None, rates: StepRates | None
) -> Choice:
    """The calls to compute again so that a micro-batch is shortest.

    Args:
        calls: of one forward, in their order.
        kept_bytes: what may be kept where compute happens; less than 0 if others need more.
        away_bytes: what may be elsewhere; None: any number.
        rates: None if they are not known yet: then all are computed again unless all can be kept,
            which takes the fewest bytes and needs no rate.
    """
    repeatable = sum(call.is_repeatable for call in calls)
    if rates is None:
        none = of_count(calls, 0, kept_bytes, away_bytes, None)
        if not none.leaving_bytes:
            return none
        return of_count(calls, repeatable, kept_bytes, away_bytes, None)
    # Not each count of very many: all of them would take longer than what they decide about.
    counts = sorted({*range(0, repeatable, 1 + repeatable // _MOST_COUNTS), repeatable})
    choices = (of_count(calls, count, kept_bytes, away_bytes, rates) for count in counts)
    # Of equal ones the first, which computes least. Where none is possible, the one that comes
    # nearest.
    return min(
        choices,
        key=lambda c: (not c.is_possible, c.micro_batch_s if c.is_possible else c.leaving_bytes),
    )


def of_count(
    calls: Sequence[CallCost],
    count: int,
    kept_bytes: int,
    away_bytes: int | None,
    rates: StepRates | None,
) -> Choice:
    """What comes of it if `count` calls are computed again; arguments as choose().

    Of those that can be. Those that are kept are the last ones, because backward needs them first.
    Those that are computed again are spread evenly among the others, so that the transfers of the
    rest have compute beside them all the time.
    """
    kept_from = len(calls) - _kept_at_end(calls, count, kept_bytes)
    able = [index for index, call in enumerate(calls[:kept_from]) if call.is_repeatable]
    assert count <= len(able)
    chosen = {able[(2 * i + 1) * len(able) // (2 * count)] for i in range(count)}
    recomputed = tuple(index in chosen for index in range(len(calls)))
    saved = sum(
        call.input_bytes if again else call.saved_bytes
        for call, again in zip(calls, recomputed, strict=True)
    )
    leaving = max(0, saved - kept_bytes)
    is_possible = away_bytes is None or leaving <= away_bytes
    if rates is None:
        return Choice(recomputed, leaving, None, is_possible)
    again_s = sum(c.forward_s for c, again in zip(calls, recomputed, strict=True) if again)
    one_way_s = leaving / rates.bytes_per_s
    both_ways_s = (2 * leaving + rates.other_bytes) / rates.bytes_per_s
    forward_s = max(rates.forward_s, one_way_s)
    backward_s = max(rates.backward_s + again_s, one_way_s)
    return Choice(recomputed, leaving, max(forward_s + backward_s, both_ways_s), is_possible)


def _kept_at_end(calls: Sequence[CallCost], count: int, kept_bytes: int) -> int:
    """How many of the last calls are kept as they are if `count` others are computed again."""
    able = sum(call.is_repeatable for call in calls)
    kept, left = 0, kept_bytes
    for call in reversed(calls):
        left -= call.saved_bytes
        able -= call.is_repeatable
        if left < 0 or able < count:
            break
        kept += 1
    return kept


@dataclass
class Forward:
    """The calls that one forward of the model has made so far.

    Attributes:
        thread: which makes them; 0: none does.
        began_bytes: what all forwards had saved for backward when it began.
        held_bytes: what other graphs kept where compute happens when it began.
        costs: of each call.
        recomputed: whether it is computed again.
        in_calls_bytes: what was saved in calls.
        other_bytes: what was saved beside them, by the model's head and loss, say; None: it has not
            ended.
    """

    thread: int = 0
    began_bytes: int = 0
    held_bytes: int = 0
    costs: list[CallCost] = field(default_factory=list)
    recomputed: list[bool] = field(default_factory=list)
    in_calls_bytes: int = 0
    other_bytes: int | None = None

    @property
    def again_s(self) -> float:
        """Seconds that backward takes to compute forwards again."""
        pairs = zip(self.costs, self.recomputed, strict=True)
        return sum(cost.forward_s for cost, again in pairs if again)

    def add(self, cost: CallCost, recomputed: bool, saved_bytes: int) -> None:
        """Another call, in which so many bytes were saved."""
        self.costs.append(cost)
        self.recomputed.append(recomputed)
        self.in_calls_bytes += saved_bytes

    def end(self, saved_bytes: int) -> None:
        """No more calls come; all forwards have saved so many bytes now."""
        self.other_bytes = max(0, saved_bytes - self.began_bytes - self.in_calls_bytes)


@dataclass(frozen=True)
class Expected:
    """What is expected of the forward at hand, by what was seen of earlier calls.

    Attributes:
        costs: of its calls.
        other_bytes: what it saves beside them; None: nobody knows yet.
        held_bytes: what other graphs keep.
    """

    costs: list[CallCost]
    other_bytes: int | None
    held_bytes: int
