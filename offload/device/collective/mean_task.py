"""What the devices of a group are to average, and the memory for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class MeanTask:
    """A mean that the devices of a group of n make; all tensors are flat and of one dtype.

    The caller keeps `flat` and `in_ram` until it is there.

    Attributes:
        flat: what this device has, of n equal parts; on the device, or in RAM if there is `sent`.
        received: as many elements in slots of an arena, for the parts that are sent to it.
        mean: where the mean of its parts comes to, on the device: rather the first part of
            `received`, if it is to go on to RAM.
        sent: as many elements as `flat`, in slots of an arena, to which that is copied from RAM.
        between: as many elements as the mean, on the device, for what replicas send.
        in_ram: memory in RAM to which the mean is copied; None: it stays on the device.
        by_group: the group sums, in the dtype of `flat` and an order of its own.

    Several tasks may have the same `received`, `sent` and `between`.
    """

    flat: torch.Tensor
    received: torch.Tensor
    mean: torch.Tensor
    sent: torch.Tensor | None = None
    between: torch.Tensor | None = None
    in_ram: torch.Tensor | None = None
    by_group: bool = False
