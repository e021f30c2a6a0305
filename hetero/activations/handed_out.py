"""Bytes of an activation that tensors view since they were brought back."""

from __future__ import annotations

import torch


class HandedOut:
    """A flat tensor over slots. All that backward was given of an activation are views of it.

    So they have one version, and one storage, which tells who else has them.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        """`flat`, a pin, is nobody else's yet."""
        self.flat = flat
        self._holders = self._count()

    @property
    def storage(self) -> int:
        """The address of the storage's object."""
        return int(self.flat.untyped_storage()._cdata)

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self.storage))

    @property
    def is_viewed(self) -> bool:
        """Whether somebody has a view."""
        return self._count() > self._holders

    @property
    def is_changed(self) -> bool:
        """Whether somebody has written to one: the bytes are not the activation's any more."""
        return self.flat._version > 0
