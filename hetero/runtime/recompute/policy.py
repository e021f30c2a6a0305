"""Which calls of blocks are computed again, step after step.

In a first forward nobody knows what it saves, so every call is made again whose kind was seen. Then
bytes alone decide: none if all fit, else all. At the end of some steps ranks agree on seconds and
rates, the slowest of all, and each chooses by these, unless that gains too little: another choice
is another order of gathers, which the next step's agreed order follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hetero.activations.store import ActivationStore
from offload.memory.sizes import format_bytes

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


_FIRST_STEPS = 2, 3  # whose ends choose by what was seen: the first step is like no other
_EVERY = 16  # steps, after which is chosen anew: a disk's speed changes within minutes
_LEAST_GAIN = 0.05  # of a micro-batch; for less the order of gathers is not changed
_MORE_BYTES = 1 << 30
# Of activations on the way, where no transfer has shown it yet: an ordinary NVMe disk's.
ASSUMED_BYTES_PER_S = 1e9
_USUAL = 1.0, 0  # the key of the choice for inputs as they were, and no other graphs
_PS = 1e-12  # ranks agree on whole numbers: picoseconds, and bytes

Agree = Callable[[int, Callable[[Iterable[int]], int], str], int]


@dataclass(frozen=True)
class SeenStep:
    """What a step has shown.

    Attributes:
        forward_s, backward_s: of compute alone, of all its micro-batches.
        micro_batches: how many it had.
        moved_bytes: per step, on the way that activations take: over the link to a device, or else
            to NVMe and from it.
        moving_s: seconds for which that was busy.
        activation_bytes: what of `moved_bytes` are activations.
    """

    forward_s: float
    backward_s: float
    micro_batches: int
    moved_bytes: float
    moving_s: float
    activation_bytes: float


class RecomputePolicy:
    """Chooses by bytes alone in the first steps, then by bytes and seconds.

    With several ranks seconds are agreed on, so that ranks whose inputs have the same shapes
    compute the same calls again, and their gathers stay in one order.
    """

    def __init__(
        self, mode: str | Sequence[str], activations: ActivationStore, agree: Agree
    ) -> None:
        """
        Args:
            mode: Config.recompute, other than "none".
            activations: what has room for how much.
            agree: ProcessGroups.agree().
        """
        self._is_all = mode == "all"
        self._activations = activations
        self._agree = agree
        self._steps = 0
        # What was chosen by; none until steps have shown it.
        self._costs: list[CallCost] = []
        self._other_bytes = 0
        self._rates: StepRates | None = None
        # By the share of the input's bytes in `_costs`', and by what other graphs keep.
        self._choices: dict[tuple[float, int], Choice] = {}

    # In a forward

    def recomputes(self, number: int, size_bytes: int, expected: Expected) -> bool:
        """Whether a call is, given its number in the forward, the size of its input, and what is
        expected of the forward."""
        # Of the first forward nobody knows what it saves beside blocks.
        if self._is_all or expected.other_bytes is None:
            return True
        choice = self._choice(number, size_bytes, expected)
        # More calls than there were, of a model whose depth changes: what saves most bytes.
        return choice.recomputed[number] if number < len(choice.recomputed) else choice.count > 0

    def _choice(self, number: int, size_bytes: int, expected: Expected) -> Choice:
        costs = self._costs or expected.costs
        one = costs[min(number, len(costs) - 1)].size_bytes
        share = size_bytes / one if one else 1.0
        held_bytes = expected.held_bytes
        if not self._costs:
            assert expected.other_bytes is not None
            others = int(expected.other_bytes * share) + held_bytes
            return self._choose([cost.times(share) for cost in costs], others)
        key = share, held_bytes
        if key not in self._choices:
            if len(self._choices) > _EVERY:  # inputs of any length
                self._choices = {_USUAL: self._choices[_USUAL]}
            others = int(self._other_bytes * share) + held_bytes
            self._choices[key] = self._choose([cost.times(share) for cost in costs], others, share)
        return self._choices[key]

    def _choose(
        self,
        costs: Sequence[CallCost],
        other_bytes: int,
        share: float = 1.0,
        more_bytes: int = 0,
    ) -> Choice:
        rates = None if self._rates is None else self._rates.times(share)
        kept_bytes = self._activations.keepable_bytes + more_bytes - other_bytes
        return choose(costs, kept_bytes, self._activations.elsewhere_bytes, rates)

    # Between steps

    def end_step(self, forward: Forward, seen: SeenStep | None) -> None:
        """A step is over, of which `forward` is the last micro-batch's; on all ranks.

        Raises PeerError if a rank does not come.
        """
        self._steps += 1
        due = self._steps in _FIRST_STEPS or self._steps % _EVERY == 0
        if not due or self._is_all:
            return
        is_known = seen is not None and sum(cost.saved_bytes for cost in forward.costs) > 0
        if not self._agree(int(is_known), min, "what is computed again"):
            return
        assert seen is not None
        self._take(*self._agreed(forward, seen), forward.other_bytes or 0)

    def _agreed(self, forward: Forward, seen: SeenStep) -> tuple[list[CallCost], StepRates]:
        def agree(value: float, choose_one: Callable[[Iterable[int]], int]) -> int:
            return self._agree(int(value), choose_one, "what is computed again")

        def slowest(seconds: float) -> float:
            return agree(seconds / _PS, max) * _PS

        saved = sum(cost.saved_bytes for cost in forward.costs)
        block_s = sum(cost.forward_s for cost in forward.costs)
        # Seconds per byte are the same for all blocks, which are alike as a rule: single calls are
        # too short to be measured well, and ranks have one number to agree on.
        s_per_byte = slowest(block_s / saved * 1e9) / 1e9
        costs = [replace(c, forward_s=c.saved_bytes * s_per_byte) for c in forward.costs]
        parts = seen.micro_batches
        bytes_per_s = ASSUMED_BYTES_PER_S
        if seen.moving_s > 0 and seen.moved_bytes > 0:
            bytes_per_s = seen.moved_bytes / seen.moving_s
        rates = StepRates(
            slowest(seen.forward_s / parts),
            slowest(max(0.0, seen.backward_s / parts - forward.again_s)),
            agree(bytes_per_s, min),
            agree(max(0.0, seen.moved_bytes - seen.activation_bytes) / parts, max),
        )
        return costs, rates

    def _take(self, costs: list[CallCost], rates: StepRates, other_bytes: int) -> None:
        """Chooses by these from now on, unless that gains next to nothing over what is chosen."""
        before = self._choices.get(_USUAL)
        old = self._costs, self._rates, self._other_bytes, self._choices
        self._costs, self._rates, self._other_bytes, self._choices = costs, rates, other_bytes, {}
        new = self._choose(costs, other_bytes)
        self._choices[_USUAL] = new
        if before is None or new.micro_batch_s is None or len(before.recomputed) != len(costs):
            return
        if before.count > sum(cost.is_repeatable for cost in costs):
            return
        kept = self._activations.keepable_bytes - other_bytes
        same = of_count(costs, before.count, kept, self._activations.elsewhere_bytes, rates)
        assert same.micro_batch_s is not None
        if same.is_possible and same.micro_batch_s - new.micro_batch_s < (
            _LEAST_GAIN * same.micro_batch_s
        ):
            self._costs, self._rates, self._other_bytes, self._choices = old

    # Words

    def words(self, forward: Forward) -> str:
        """What became of the calls of `forward`, what is expected of it, and what more RAM would
        change."""
        if not forward.costs:
            return (
                "No call of a block was seen yet that could be computed again in backward; those "
                "under torch.compile, in checkpoints, and in other threads than the forward's "
                "never are."
            )
        again, calls = sum(forward.recomputed), len(forward.costs)
        saved = sum(cost.saved_bytes for cost in forward.costs) // calls
        inputs = sum(cost.input_bytes for cost in forward.costs) // calls
        block_s = sum(cost.forward_s for cost in forward.costs) / calls
        lines = [
            f"Of {calls} calls of blocks {again} are computed again in backward; one saves about "
            f"{format_bytes(saved)}, its input has {format_bytes(inputs)}, its forward takes "
            f"{block_s:.2g} s."
        ]
        if self._is_all:
            return lines[0]
        if self._rates is None:
            lines.append("They were chosen by bytes: no step has measured the seconds yet.")
            return " ".join(lines)
        now = self._choose(self._costs, self._other_bytes)
        more = self._choose(self._costs, self._other_bytes, more_bytes=_MORE_BYTES)
        lines.append(
            f"{format_bytes(now.leaving_bytes)} leave for slower memory at "
            f"{self._rates.bytes_per_s / 1e9:.2g} GB/s; a micro-batch is expected to take "
            f"{now.micro_batch_s:.3g} s, with one more GiB for activations "
            f"{more.micro_batch_s:.3g} s, {more.count} of them computed again."
        )
        return " ".join(lines)
