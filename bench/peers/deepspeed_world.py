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


def zero3_config(
    optimizer: dict[str, Any],
    batch_size: int = 1,
    nvme_path: str | None = None,
    param_buffer_numel: int | None = None,
    buffer_count: int = 5,
    **zero: Any,
) -> dict[str, Any]:
    """DeepSpeed's configuration of ZeRO-3 in bf16 with AdamW, offloaded.

    Args:
        optimizer: AdamW's parameters.
        batch_size: of a micro-batch.
        nvme_path: for optimizer state, pipelined as its documentation recommends; None: in RAM.
        param_buffer_numel: of buffers for parameters, which then are in `nvme_path`, too.
        buffer_count: buffers of each.
        zero: more of "zero_optimization".
    """
    ram: dict[str, Any] = {"device": "cpu", "pin_memory": False}
    nvme = ram | {"device": "nvme", "nvme_path": nvme_path, "buffer_count": buffer_count}
    pipelined = nvme | {"pipeline_read": True, "pipeline_write": True}
    param = ram if param_buffer_numel is None else nvme | {"buffer_size": param_buffer_numel}
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": ram if nvme_path is None else pipelined,
            "offload_param": param,
            **zero,
        },
        "optimizer": {"type": "AdamW", "params": optimizer},
        "aio": AIO,
    }
