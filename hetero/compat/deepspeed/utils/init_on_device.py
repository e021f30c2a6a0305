"""Models that are built on another device, or in another dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import torch


class OnDevice(AbstractContextManager["OnDevice"]):
    """Inside the block tensors are made on `device`, floating-point ones with `dtype`.

    Args:
        dtype: of torch.
        device: of torch; "meta" makes none at all.
        enabled: False: the block does nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._left = ExitStack()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._left.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self._left.enter_context(torch.device(self._device))
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()
