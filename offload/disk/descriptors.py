"""Descriptors that are of one process alone: a child that it forks closes them at once.

As long as it lives the child would keep the space of an unlinked file allocated, and hold a lock
(flock) that its parent has let go of, or has died with.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class _HasDescriptors(Protocol):
    def close(self) -> None:
        """Closes them; idempotent."""


not_in_children: weakref.WeakSet[_HasDescriptors] = weakref.WeakSet()


def _close_in_child() -> None:
    for each in list(not_in_children):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
