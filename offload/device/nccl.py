"""NCCL's process groups of torch.distributed, by which devices exchange bytes without RAM."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_FOREVER = timedelta(days=365)
# What a process group reads when it is made. By default its own threads end the process when a
# collective fails, or has made no progress for eight minutes; and by the last one a user may have
# made work.wait() wait on the host.
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
_setting = threading.Lock()


def has_nccl() -> bool:
    """Whether torch was built with NCCL."""
    return dist.is_available() and dist.is_nccl_available()


def nccl_group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """NCCL's process group of `size` ranks, each with a device of its own; all of them call this.

    It knows no time limit: whoever waits for its collectives looks whether that is in vain, and
    calls abort(), which ends them on this device whatever the other ones do.

    Args:
        store: torch.distributed's, by which the ranks find each other; nothing else uses its keys.
        rank: this one's number in the group.
        size: of the group.
        device: this rank's.

    Raises RuntimeError if they cannot be connected.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = _FOREVER
    with _environment(_SETTINGS):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    # Now, when all ranks are here, and not in the first collective.
    group.eager_connect_single_device(device)
    return group


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Inside the block the process's environment has these values."""
    with _setting:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
