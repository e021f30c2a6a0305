"""colossalai.launch: a process joins the others, with a configuration."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, ParamSpec, cast

import torch
import torch.distributed as dist

from hetero.compat.colossalai.core import global_context
from hetero.compat.ranks import join
from hetero.ranks.process_groups import is_distributed

_Given = ParamSpec("_Given")


def _config_may_come_first(function: Callable[_Given, None]) -> Callable[_Given, None]:
    """Takes a first argument that is a configuration as `config`, as earlier releases have it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        if args and _is_config(args[0]):
            kwargs["config"], args = args[0], args[1:]
        function(*args, **kwargs)

    return cast("Callable[_Given, None]", call)


def _is_config(value: object) -> bool:
    is_path = isinstance(value, PathLike) or (isinstance(value, str) and value.endswith(".py"))
    return value is None or is_path or isinstance(value, Mapping)


@_config_may_come_first
def launch_from_torch(
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    *,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
) -> None:
    """Joins torchrun's ranks, if there are several, and reads the configuration.

    Args:
        backend: of torch.distributed; "nccl" is gloo where there is no GPU, and gloo beside it.
        seed: of random numbers.
        verbose: not needed.
        config: a mapping, or the path of a Python file; as the first argument, too.

    Raises:
        ValueError: the configuration has an unknown or refused key.
    """
    join(backend if torch.cuda.is_available() else None)
    global_context.load_config(config or {})
    options = global_context.config
    torch.backends.cudnn.benchmark = bool(options.get("cudnn_benchmark", False))
    torch.backends.cudnn.deterministic = bool(options.get("cudnn_deterministic", False))
    torch.manual_seed(seed)


@_config_may_come_first
def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
) -> None:
    """As launch_from_torch(), with what torchrun would have said; one process gets a group, too.

    Args:
        rank, world_size: of this process.
        host, port: of the first rank, where all meet.
        backend, seed, verbose, config: as of launch_from_torch().
        local_rank: of this process on its machine. Default: as torchrun says, or `rank`.

    Raises:
        ValueError: the configuration has an unknown or refused key.
    """
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(port)
    )
    os.environ.setdefault("LOCAL_RANK", str(rank if local_rank is None else local_rank))
    launch_from_torch(backend, seed, verbose, config=config)
    if world_size == 1 and not is_distributed():
        # As there: loops ask torch.distributed for their rank.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


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
