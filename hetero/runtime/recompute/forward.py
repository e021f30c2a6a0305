"""The calls of blocks that one forward of the model makes, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero.runtime.recompute.choice import CallCost


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
