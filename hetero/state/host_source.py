"""Whole chunks in RAM, from where they are copied to a DEVICE with memory of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero.chunks.layout import Layout
from hetero.state.memory.homes import Homes
from offload.device.shared_cache import HostCopy, SharedCache


@dataclass(frozen=True, eq=False)
class HostSource:
    """Whole chunks in RAM: at home there, or in `slots`, which the file or all ranks fill."""

    layout: Layout
    homes: Homes
    slots: SharedCache

    def home(self, chunk: int) -> torch.Tensor | None:
        """The whole chunk, flat, if its home is in RAM; else None."""
        found = self.layout.chunks[chunk]
        return self.homes.flat(found) if self.homes.whole and found in self.homes else None

    def start(self, chunk: int) -> HostCopy | None:
        """Starts filling slots with a chunk whose home is not in RAM; None if there is no room."""
        return self.slots.start(chunk)

    def no_room(self, chunk: int) -> Exception:
        """The error to raise if room for the chunk is waited for no longer."""
        return self.slots.no_room(chunk)
