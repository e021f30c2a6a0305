"""Whole chunks in RAM, from where they are copied to a DEVICE with memory of its own."""

from __future__ import annotations

import torch

from hetero.chunks.layout import Layout
from hetero.state.memory.homes import Homes
from offload.device.shared_cache import HostCopy, SharedCache


class HostSource:
    """Whole chunks in RAM: at home there, or in slots that the file or all ranks fill."""

    def __init__(self, layout: Layout, homes: Homes, slots: SharedCache | None) -> None:
        """`slots` are for chunks that have no whole home in RAM; None if all have."""
        self._layout = layout
        self._homes = homes
        self._slots = slots

    def home(self, chunk: int) -> torch.Tensor | None:
        """The whole chunk, flat, if its home is in RAM; else None."""
        found = self._layout.chunks[chunk]
        return self._homes.flat(found) if self._homes.whole and found in self._homes else None

    def start(self, chunk: int) -> HostCopy | None:
        """Starts filling slots with a chunk whose home is not in RAM; None if there is no room."""
        assert self._slots is not None
        return self._slots.start(chunk)

    def no_room(self, chunk: int) -> Exception:
        """The error to raise if room for the chunk is waited for no longer."""
        assert self._slots is not None
        return self._slots.no_room(chunk)
