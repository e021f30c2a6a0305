"""What step() needs first is read while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from hetero.chunk_groups.chunk_group import ChunkGroup


class ReadingAhead:
    """Has optimizer states (and DISK-homed parameters) read into the step pipelines' buffers.

    It begins with the first gradient of a step. Not before: it would compete with forward, for a
    step that may not come. Not with a later micro-batch: nobody knows which backward is the last,
    and what was read once stays. Gradients are not read ahead, because more may be added to them.
    """

    def __init__(self, chunk_groups: Sequence[ChunkGroup], enabled: bool) -> None:
        """`chunk groups` may grow."""
        self._chunk_groups = chunk_groups
        self._enabled = enabled
        self._begun = False

    def begin(self) -> None:
        """A gradient came. Idempotent until end_step()."""
        if self._begun or not self._enabled:
            return
        self._begun = True
        for chunk_group in self._chunk_groups:
            # If somebody has an optimizer state open now, the buffers are his.
            if chunk_group.optim_states.lock.acquire(blocking=False):
                try:
                    with suppress(
                        RuntimeError, OSError
                    ):  # a pipeline that failed says so to step()
                        chunk_group.stepper.read_ahead()
                finally:
                    chunk_group.optim_states.lock.release()

    def end_step(self) -> None:
        """The next gradient is of another step."""
        self._begun = False
