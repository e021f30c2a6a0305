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
    unscaling gave gradients the factor that was guessed, and else has it made again. Optimizer
    state that is in memory is always updated at step().
    """

    # As BOTH where recent steps say that the guess will be right, else as FORWARD.
    AUTO = "auto"
    NONE = "none"  # all are submitted by step(), which waits for them
    FORWARD = "forward"  # all are submitted by step(); the next use of a chunk waits for its own
    BACKWARD = "backward"  # a chunk's is submitted when its gradients are final; step() waits
    BOTH = "both"  # submitted when gradients are final; the next use of a chunk waits

    @property
    def in_forward(self) -> bool:
        """Whether step() returns while updates go on."""
        return self in (OverlapUpdates.AUTO, OverlapUpdates.FORWARD, OverlapUpdates.BOTH)

    @property
    def in_backward(self) -> bool:
        """Whether updates may be submitted before step()."""
        return self in (OverlapUpdates.AUTO, OverlapUpdates.BACKWARD, OverlapUpdates.BOTH)

    @property
    def repeats(self) -> bool:
        """Whether updates have the same order in each step; else each step reverses it."""
        return self is not OverlapUpdates.NONE
