"""Where chunks are in RAM before they are copied to the device."""

from __future__ import annotations

import torch

from hetero.chunks.layout import Layout
from hetero.state.homes import Homes
from offload.device.shared_cache import HostCopy, SharedCache


class HostSource:
    """Whole chunks: at home in RAM, or in slots there, which the file or all ranks fill."""

    def __init__(self, layout: Layout, homes: Homes, slots: SharedCache | None) -> None:
        """`slots` are for chunks that have no whole home in RAM; None if all have."""
        self._layout = layout
        self._homes = homes
        self._slots = slots

    def home(self, chunk: int) -> torch.Tensor | None:
        """The chunk, flat, if it is in RAM for good."""
        found = self._layout.chunks[chunk]
        return self._homes.flat(found) if self._homes.whole and found in self._homes else None

    def start(self, chunk: int) -> HostCopy | None:
        """Starts bringing another chunk to a slot; None if there is no room now."""
        assert self._slots is not None
        return self._slots.start(chunk)

    def no_room(self, chunk: int) -> Exception:
        """The error that says so."""
        assert self._slots is not None
        return self._slots.no_room(chunk)
