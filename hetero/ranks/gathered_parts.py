"""Memory for what the members of a group give each other."""

from __future__ import annotations

import threading

import torch

from hetero.ranks.messages import as_bytes


class GatheredParts:
    """Memory for the parts of all members, in their order, which may be taken away meanwhile."""

    def __init__(self, whole: torch.Tensor | None, size: int) -> None:
        """`whole`, flat, is for the parts of `size` members; None: what comes is not kept."""
        self.lock = threading.Lock()  # guards `rows`, and what is in it
        self.rows = None if whole is None else as_bytes(whole).view(size, -1)

    def let_go(self) -> bool:
        """Nothing is written to the memory any more, so that parts may be missing: True."""
        with self.lock:
            self.rows = None
        return True

    def store(self, begin: int, pieces: torch.Tensor) -> None:
        """Takes bytes of all members' parts, a row each, from byte `begin` of the parts on."""
        with self.lock:
            if self.rows is not None:
                self.rows[:, begin : begin + pieces.shape[1]].copy_(pieces)
