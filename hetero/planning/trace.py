"""What a training step uses, in what order, and how long it computes: what predictions start from.

trace     a chunk group's uses in one step, in order, and its seconds of computing.
use       a chunk is needed by compute, in forward or in backward.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hetero.chunks.layout import Layout


class Phase(enum.Enum):
    """Parts of a step that compute with chunks; a step with several micro-batches alternates."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Use:
    """A chunk is needed."""

    chunk: int
    phase: Phase


@dataclass(frozen=True)
class Trace:
    """One step of a chunk group.

    Attributes:
        uses: of all micro-batches, in order.
        micro_batches: forwards, each with its backward.
        forward_s, backward_s: seconds of computing alone, of all micro-batches.
        expected: the seconds were not measured.
    """

    uses: tuple[Use, ...]
    micro_batches: int
    forward_s: float
    backward_s: float
    expected: bool = False


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step.

    Attributes:
        tokens: of one micro-batch.
        micro_batches: of the step.
        checkpointing: backward computes forward once more.
    """

    tokens: int
    micro_batches: int = 1
    checkpointing: bool = False


@dataclass(frozen=True)
class Computing:
    """Seconds of a step that compute takes alone, measured without any transfer."""

    forward_s: float
    backward_s: float


def expected_uses(layout: Layout, micro_batches: int) -> tuple[Use, ...]:
    """Each chunk once in forward, in the order of registration, and in the reverse in backward."""
    # By the place of the first parameter in the model.
    order = sorted(layout.chunks, key=lambda c: min(s.param.index for s in c.slices))
    forward = [Use(chunk.id, Phase.FORWARD) for chunk in order]
    backward = [Use(chunk.id, Phase.BACKWARD) for chunk in reversed(order)]
    return tuple(forward + backward) * micro_batches


def expected_trace(layout: Layout, work: Work, flop_per_s: float) -> Trace:
    """A trace before any step was measured.

    Computing takes 2 floating-point operations per parameter and token in forward and 4 in backward
    (6 if it computes forward again). Attention's own products, which grow with the sequence, are
    left out: they are few beside these unless sequences are longer than some six times the width of
    the model.

    Args:
        layout: of the chunk group.
        work: what the rank computes.
        flop_per_s: rate of its products of matrices.
    """
    second = layout.numel * work.tokens * work.micro_batches / flop_per_s
    return Trace(
        uses=expected_uses(layout, work.micro_batches),
        micro_batches=work.micro_batches,
        forward_s=2 * second,
        backward_s=(6 if work.checkpointing else 4) * second,
        expected=True,
    )
