"""colossalai.launch: a process joins the others, with a configuration."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

from hetero.compat.colossalai.core import global_context
from hetero.compat.ranks import join


def launch_from_torch(
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Joins torchrun's ranks, if there are several, and reads the configuration.

    Args:
        config: a mapping, or the path of a Python file.
        backend: of torch.distributed; "nccl" is gloo where there is no GPU, and gloo beside it.
        seed: of random numbers.
        verbose: not needed.

    Raises:
        ValueError: the configuration has an unknown or refused key.
    """
    join(backend if torch.cuda.is_available() else None)
    global_context.load_config(config or {})
    options = global_context.config
    torch.backends.cudnn.benchmark = bool(options.get("cudnn_benchmark", False))
    torch.backends.cudnn.deterministic = bool(options.get("cudnn_deterministic", False))
    torch.manual_seed(seed)


def launch(
    config: Mapping[str, Any] | str | PathLike[str] | None,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """As launch_from_torch(), with what torchrun would have said.

    Args:
        config, backend, seed, verbose: as of launch_from_torch().
        rank, world_size: of this process.
        host, port: of the first rank, where all meet.
        local_rank: of this process on its machine. Default: as torchrun says, or `rank`.

    Raises:
        ValueError: the configuration has an unknown or refused key.
    """
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(port)
    )
    os.environ.setdefault("LOCAL_RANK", str(rank if local_rank is None else local_rank))
    launch_from_torch(config, backend, seed, verbose)


def get_default_parser() -> argparse.ArgumentParser:
    """A parser with ColossalAI's arguments: --config, --host, --port, --world_size, --rank,
    --local_rank, --backend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, help="the path of the configuration")
    for name, kind in (("host", str), ("port", int), ("world_size", int), ("rank", int)):
        parser.add_argument(f"--{name}", type=kind, help="as torchrun says, if it is not given")
    parser.add_argument("--local_rank", type=int, help="as torchrun says, if it is not given")
    parser.add_argument("--backend", type=str, default="nccl", help="of torch.distributed")
    return parser
