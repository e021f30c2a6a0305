"""The ranks of a peer: processes that torch.distributed connects, DeepSpeed's among them."""

from __future__ import annotations

import gc
import importlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def joined() -> Iterator[None]:
    """Connected, over gloo, with the ranks that the environment names.

    What uses the connection must not be referred to any more at the end: its threads end there, in
    order. Those that are left can abort the interpreter as it ends.
    """
    # Loaded by others later on, it would keep the connection in its functions' default arguments.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        gc.collect()  # modules of DDP and FSDP are in reference cycles
        dist.destroy_process_group()


def rank() -> int:
    """This process's number from 0; 0 where there is no other."""
    return dist.get_rank() if dist.is_initialized() else 0


def gathered(values: list[float]) -> torch.Tensor:
    """Every rank's `values`, of the same number everywhere: float64[ranks, len(values)].

    Raises RuntimeError if a rank is gone.
    """
    mine = torch.tensor(values, dtype=torch.float64)
    if not dist.is_initialized():
        return mine[None]
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found)


# DeepSpeed's asynchronous I/O, where state goes to files.
_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 16,
    "thread_count": 1,
    "single_submit": False,
    "overlap_events": True,
}


def deepspeed_module(name: str = "deepspeed") -> Any:
    """A module of DeepSpeed for the CPU, by name, because type checking must not need it.

    Raises ModuleNotFoundError where DeepSpeed is not installed.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # which importing reads
    return importlib.import_module(name)


def start_deepspeed() -> Any:
    """Returns the deepspeed module after joining, over gloo, the ranks that the environment names.

    Without RANK in the environment it is a world of one, set up as its launcher would. Raises as
    deepspeed_module() does.
    """
    # Inside zero.Init, which replaces torch.Tensor.__new__, this import would fail, and
    # transformers makes it when it loads a model's module.

    deepspeed = deepspeed_module()
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
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
        "aio": _AIO,
    }


def deepspeed_engine(
    deepspeed: Any,
    config: dict[str, Any],
    make: Callable[[], Any],
    change: Callable[[Any], object] = lambda model: None,
) -> tuple[Any, Any]:
    """An engine and its optimizer for the model that `make` makes, sharded as it is made, and that
    `change` changes then."""
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make()
    change(model)
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    return engine, optimizer
