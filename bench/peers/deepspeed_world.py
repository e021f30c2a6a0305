"""What every peer that runs DeepSpeed on the CPU sets up before it starts."""

from __future__ import annotations

import importlib
import os
from typing import Any

from bench.peers.world import free_port

# Of its asynchronous I/O, where state goes to files.
AIO = {
    "block_size": 1 << 20,
    "queue_depth": 16,
    "thread_count": 1,
    "single_submit": False,
    "overlap_events": True,
}


def start_world() -> Any:
    """Returns the deepspeed module after joining, over gloo, the ranks that the environment names.

    Without RANK in the environment it is a world of one, set up as its launcher would. Raises
    ModuleNotFoundError where DeepSpeed is not installed.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # which importing reads
    # By name, because type checking must not need it.
    deepspeed: Any = importlib.import_module("deepspeed")
    if "RANK" not in os.environ:
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
    deepspeed.init_distributed("gloo")
    return deepspeed
