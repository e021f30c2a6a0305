"""What step() needs first is read while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from hetero.chunk_groups.chunk_group import Bank


class ReadingAhead:
    """Has records (and DISK-homed parameters) read into the step pipelines' buffers.

    It begins with the first gradient of a step. Not before: it would compete with forward, for a
    step that may not come. Not with a later micro-batch: nobody knows which backward is the last,
    and what was read once stays. Gradients are not read ahead, because more may be added to them.
    """

    def __init__(self, banks: Sequence[Bank], enabled: bool) -> None:
        """`banks` may grow."""
        self._banks = banks
        self._enabled = enabled
        self._begun = False

    def begin(self) -> None:
        """A gradient came. Idempotent until end_step()."""
        if self._begun or not self._enabled:
            return
        self._begun = True
        for bank in self._banks:
            # If somebody has a record open now, the buffers are his.
            if bank.records.lock.acquire(blocking=False):
                try:
                    with suppress(
                        RuntimeError, OSError
                    ):  # a pipeline that failed says so to step()
                        bank.stepper.read_ahead()
                finally:
                    bank.records.lock.release()

    def end_step(self) -> None:
        """The next gradient is of another step."""
        self._begun = False
