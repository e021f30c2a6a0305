"""What the updates of the optimizer may overlap with."""

from __future__ import annotations

import enum

# Where each step has the same order of updates, so many buffers pass tiles on (two are read, one is
# updated, two are written). The others keep the optimizer states that the next step needs last, so
# that the chunks which the next forward uses first need not be read.
STREAMING_BUFFERS = 5


class OverlapUpdates(str, enum.Enum):
    """Two policies in one option: when an update is submitted, and who waits for it.

    What is submitted when gradients are final is speculative: step() keeps it if clipping and
    unscaling gave gradients the factor that was guessed, and else takes it back. Optimizer
    state that is in memory is always updated at step().
    """

    in_forward: bool  # step() returns while updates go on
    in_backward: bool  # updates may be submitted before step()
    repeats: bool  # updates have the same order in each step; else each step reverses it

    def __new__(
        cls, value: str, in_forward: bool = False, in_backward: bool = False
    ) -> OverlapUpdates:
        """The member that the option calls `value`."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.in_forward, member.in_backward = in_forward, in_backward
        member.repeats = in_forward or in_backward
        return member

    # As BOTH where recent steps say that the guess will be right, else as FORWARD.
    AUTO = "auto", True, True
    NONE = "none", False, False  # all are submitted by step(), which waits for them
    # All are submitted by step(); the next use of a chunk waits for its own.
    FORWARD = "forward", True, False
    # A chunk's is submitted when its gradients are final; step() waits.
    BACKWARD = "backward", False, True
    BOTH = "both", True, True  # submitted when gradients are final; the next use of a chunk waits
