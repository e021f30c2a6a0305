"""ColossalAI's older route: launch() reads a configuration, initialize() makes an engine of it."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import runpy
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, ParamSpec, cast

import torch
import torch.distributed as dist

from hetero.compat.colossalai.argument_keys import CONFIGURATION
from hetero.compat.colossalai.scaled_optimizer import ScaledOptimizer
from hetero.compat.colossalai.wrapped_model import WrappedModel
from hetero.compat.colossalai.zero import ShardedModelV2, ShardedOptimizerV2
from hetero.compat.key_table import log_not_needed, refuse_unknown
from hetero.compat.ranks import join, rank, ranks
from hetero.ranks.process_groups import is_distributed

_Given = ParamSpec("_Given")
_Configuration = Mapping[str, Any] | str | PathLike[str]


class Options(dict[str, Any]):
    """A mapping whose keys are attributes, too, inside of others as well."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__({n: Options(v) if isinstance(v, dict) else v for n, v in given.items()})

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the configuration has no {name!r}")
        return self[name]


class GlobalContext:
    """The configuration of this process, as `config`, and its place among the ranks."""

    def __init__(self) -> None:
        self.config = Options({})

    def load_config(self, config: _Configuration) -> None:
        """Reads a configuration, or a Python file of one.

        Raises ValueError for a key that is refused, and for one that is nearly one of ColossalAI's;
        all others are the user's own.
        """
        given = config if isinstance(config, Mapping) else runpy.run_path(str(config))
        given = {name: value for name, value in given.items() if not name.startswith("__")}
        near = functools.partial(difflib.get_close_matches, n=1, cutoff=0.85)
        known = CONFIGURATION.keys
        CONFIGURATION.read({name: value for name, value in given.items() if near(name, known)})
        self.config = Options(given)

    def get_global_rank(self) -> int:
        """This rank's number."""
        return rank()

    def get_world_size(self, parallel_mode: object = None) -> int:
        """The number of ranks."""
        return ranks()


global_context = GlobalContext()


def _config_may_come_first(function: Callable[_Given, None]) -> Callable[_Given, None]:
    """Takes a first argument that is a configuration as `config`, as earlier releases have it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        first = args[0] if args else 0
        is_file = isinstance(first, str) and first.endswith(".py")
        if first is None or is_file or isinstance(first, (PathLike, Mapping)):
            kwargs["config"], args = first, args[1:]
        function(*args, **kwargs)

    return cast("Callable[_Given, None]", call)


@_config_may_come_first
def launch_from_torch(
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    *,
    config: _Configuration | None = None,
) -> None:
    """Joins torchrun's ranks, if there are several, seeds, and reads the configuration.

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
    config: _Configuration | None = None,
) -> None:
    """As launch_from_torch(), with what torchrun would have said; one process gets a group, too."""
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
    """A parser with ColossalAI's arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="the path of the configuration")
    parser.add_argument("--host", help="as torchrun says, if it is not given")
    for name in ("port", "world_size", "rank", "local_rank"):
        parser.add_argument(f"--{name}", type=int, help="as torchrun says, if it is not given")
    parser.add_argument("--backend", default="nccl", help="of torch.distributed")
    return parser


class Engine:
    """A model, its criterion and its optimizer, and the calls of a training loop.

        engine.zero_grad()
        loss = engine.criterion(engine(data), label)
        engine.backward(loss)
        engine.step()

    With gradient accumulation zero_grad() and step() act once in so many calls.
    """

    def __init__(
        self,
        model: WrappedModel,
        optimizer: ScaledOptimizer,
        criterion: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        config = global_context.config
        self._clip_grad_norm = float(config.get("clip_grad_norm", 0.0))
        self._accumulation_steps = int(config.get("gradient_accumulation", 1))
        self._micro_batches = 0  # of this step, whose gradients are there
        self.train, self.eval = model.train, model.eval

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def zero_grad(self) -> None:
        """Clears gradients; not between the micro-batches of a step."""
        if self._micro_batches == 0:
            self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of a micro-batch, whose loss is divided by their number."""
        self._micro_batches += 1
        if self._accumulation_steps > 1:
            loss = loss / self._accumulation_steps
        self.optimizer.backward(loss)

    def step(self) -> bool:
        """Clips and updates; False if an overflow skips the step, or if it only counts."""
        if self._micro_batches < self._accumulation_steps:
            return False
        self._micro_batches = 0
        if self._clip_grad_norm > 0:
            self.optimizer.clip_grad_norm(self.model, self._clip_grad_norm)
        done = self.optimizer.step()
        self.optimizer.zero_grad()
        return done is not False

    def execute_schedule(self, batch: Any) -> tuple[Any, Any, torch.Tensor | None]:
        """Computes outputs, label and loss of a micro-batch (data, label); trains in that mode.

        Data may be a tensor, a list or tuple of arguments, or a mapping of them.
        """
        data, label = batch
        if isinstance(data, dict):
            output = self(**data)
        else:
            output = self(*data) if isinstance(data, (list, tuple)) else self(data)
        loss = None if self.criterion is None else self.criterion(output, label)
        if self.training and loss is not None:
            self.backward(loss)
        return output, label, loss


def initialize(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., torch.Tensor] | None = None,
    train_dataloader: Iterable[Any] | None = None,
    test_dataloader: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    ophooks: Any = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """Makes the engine that the configuration of colossalai.launch() describes.

    Args:
        model: built inside ZeroInitContext, or outside.
        optimizer: as of ShardedOptimizerV2.
        criterion: gives the loss of outputs and labels.
        train_dataloader, test_dataloader, lr_scheduler: come back as they are.
        ophooks, verbose: not needed.

    Returns:
        The engine, the loaders and the scheduler.

    Raises:
        ValueError: an unknown key or argument, with the nearest name.
        Exception: as hetero.initialize().
    """
    if ophooks:
        log_not_needed("colossalai.initialize: ophooks", "the engine's hooks move parameters")
    if not isinstance(model, torch.nn.Module):
        model = model()
    zero = global_context.config.get("zero")
    if zero is None:  # plain data parallelism there
        zero = {"model_config": {"dtype": "fp32", "zero_stage": 1}}
    refuse_unknown("zero", zero, ["model_config", "optimizer_config"])
    wrapped = ShardedModelV2(model, **zero.get("model_config", {}))
    scaled = ShardedOptimizerV2(wrapped, optimizer, **zero.get("optimizer_config", {}))
    return Engine(wrapped, scaled, criterion), train_dataloader, test_dataloader, lr_scheduler
