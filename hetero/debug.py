"""Options that no training needs: for measurements, for trials, and for code of other projects."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from hetero.option_checks import check_choice, is_number
from hetero.overlap import OverlapUpdates

DEFAULT_LINK_GBPS = 16.0  # of PCIe 4.0 x8, or of a shared x16 slot
_STRATEGIES = ("chunk", "tensor", "bucket")
Engine = Literal["auto", "io_uring", "threads"]


@dataclass(frozen=True)
class DebugOptions:
    """The value of hetero.Config's option `debug`; the defaults are right for training.

    Args:
        prefetch: read state on NVMe ahead of its use: parameters, and, while backward runs, the
            optimizer state that step() needs first. Default: True. False is for measurements.
        io_engine: the engine that reads and writes scratch files: "io_uring", "threads", or "auto"
            (default): io_uring where the kernel allows it. Threads are slower and work everywhere.
        overlap_updates: when parameters are updated, and what waits for it. The result has the same
            bits in all cases, also with clipping, loss scaling and several ranks. "auto" (default):
            a chunk whose optimizer state is on NVMe is updated during backward, as soon as its
            gradients are final (from the second step on, and if recent steps predict the factor
            by which step() multiplies gradients). step() returns during updates: a use of a
            parameter waits for its chunk alone, and optimizer.engine.synchronize() waits for all.
            An update that step() does not confirm is rolled back and redone; a use of a value or
            a change of a gradient before step() rolls it back first. That needs room on NVMe for
            optimizer state twice; without it chunks are updated in step(). "none": in step(), which
            waits. "forward": step() submits all updates and does not wait. "backward": as early as
            with "auto", and step() waits. "both": as early, whatever recent steps predict, and
            step() does not wait.
        link_gbps: GB/s of each direction of the emulated device's link; for backend="emulated"
            only. Default: 16, as PCIe 4.0 x8 has.
        allow_ram_filesystem: nvme_path may be on a filesystem whose files are RAM (tmpfs, often
            /dev/shm and /tmp), for trials. Default: False: such a path is refused, because state
            there frees no RAM, and no budget would count it. True takes nvme_capacity, by
            default half, from host_memory. Not with process_memory or durable=True.
        shard_strategy: the tensors of a chunk, for hetero.compat. "chunk" (default): tensors in the
            model's order, packed tightly. "tensor": one tensor. "bucket": the tensors of one
            module. Also an object of TensorShardStrategy or BucketTensorShardStrategy. The last
            two waste the rest of a slot.

    Raises:
        ValueError: an option has a wrong type or value.
    """

    prefetch: bool = True
    io_engine: Engine = "auto"
    overlap_updates: OverlapUpdates = OverlapUpdates.AUTO  # or its value
    link_gbps: float | None = None
    allow_ram_filesystem: bool = False
    shard_strategy: Any = "chunk"

    def __post_init__(self) -> None:
        check_choice("io_engine", self.io_engine, get_args(Engine))
        strategy = getattr(self.shard_strategy, "name", self.shard_strategy)
        check_choice("shard_strategy", strategy, _STRATEGIES)
        object.__setattr__(self, "shard_strategy", strategy)
        for name in ("prefetch", "allow_ram_filesystem"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        check_choice(
            "overlap_updates", self.overlap_updates, [each.value for each in OverlapUpdates]
        )
        object.__setattr__(self, "overlap_updates", OverlapUpdates(self.overlap_updates))

    def for_backend(self, backend: str) -> DebugOptions:
        """The options with link_gbps where `backend` has a link.

        Raises ValueError if it was given and there is none, or if it is no bandwidth.
        """
        if backend == "emulated":
            gbps = DEFAULT_LINK_GBPS if self.link_gbps is None else self.link_gbps
            if not is_number(gbps) or not 1e-6 <= gbps < math.inf:
                raise ValueError(
                    f"link_gbps must be a number of GB/s of at least 1e-6, such as 16, not {gbps!r}"
                )
            return replace(self, link_gbps=float(gbps))
        if self.link_gbps is not None:
            raise ValueError(
                f"link_gbps is of no use with backend={backend!r}, which has no link; leave "
                f"it out, or give backend='emulated'"
            )
        return self


NAMES = tuple(field.name for field in fields(DebugOptions))
