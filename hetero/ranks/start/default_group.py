"""The default process group of ranks that torchrun has started, or restarted."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hetero.ranks.start.machine import choose_interface


def init_default_group(timeout: timedelta | None = None, backend: str = "gloo") -> None:
    """torch.distributed.init_process_group(backend, timeout=timeout), of torchrun's ranks.

    All must call it. After torchrun has restarted them (--max-restarts), too: its agent keeps its
    store, and torch (2.13) looks for addresses of the new ranks under the same keys as those of the
    old ones, which it finds, and then fails or waits for ever.

    Raises RuntimeError if ranks are missing, ValueError as choose_interface() does.
    """
    # Loaded after the group is there, it would keep the group's threads past its end: they would be
    # in its functions' default arguments.
    import torch.distributed.nn.functional  # noqa: F401

    choose_interface()
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, **more)
        return
    store, rank, size = next(dist.rendezvous("env://", **more))  # type: ignore[attr-defined]
    store = dist.distributed_c10d.PrefixStore(f"restart {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **more)
