"""What a training step uses and how long it computes: what predictions start from."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hetero.chunks.layout import Layout


class Phase(enum.Enum):
    """Parts of a step that compute with chunks; a step with several micro-batches alternates."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step."""

    tokens: int  # of one micro-batch
    micro_batches: int = 1
    checkpointing: bool = False  # backward computes forward once more


@dataclass(frozen=True)
class Computing:
    """Seconds of a step, of all micro-batches, that compute takes alone, without any transfer."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Trace(Computing):
    """A step of a chunk group; forward uses chunks in use_order(), backward in the reverse."""

    micro_batches: int  # forwards, each with its backward
    expected: bool = False  # the seconds were not measured


def use_order(layout: Layout) -> list[int]:
    """The chunks in the order of registration: by the place of their first parameters."""
    order = sorted(layout.chunks, key=lambda c: min(s.param.index for s in c.slices))
    return [chunk.id for chunk in order]


def expected_trace(layout: Layout, work: Work, flop_per_s: float) -> Trace:
    """A trace before any step was measured.

    Computing takes 2 floating-point operations per parameter and token in forward and 4 in backward
    (6 if it computes forward again). Attention's own products, which grow with the sequence, are
    left out: they are few beside these unless sequences are longer than some six times the width of
    the model.
    """
    second = layout.numel * work.tokens * work.micro_batches / flop_per_s
    backward_s = (6 if work.checkpointing else 4) * second
    return Trace(2 * second, backward_s, work.micro_batches, expected=True)
