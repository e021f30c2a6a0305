"""ColossalAI's older route: launch() reads a configuration, initialize() makes an engine of it.

The names of colossalai.core, engine, logging and utils are here; arguments are ColossalAI's.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import runpy
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from hetero.compat import ranks as places
from hetero.compat.colossalai.argument_keys import CONFIGURATION
from hetero.compat.colossalai.zero import ScaledOptimizer, ShardedModelV2, ShardedOptimizerV2
from hetero.compat.key_table import log_given, refuse_unknown
from hetero.ranks.process_groups import is_distributed

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
        return places.rank()

    def get_world_size(self, parallel_mode: object = None) -> int:
        """The number of ranks."""
        return places.ranks()


global_context = GlobalContext()


def launch_from_torch(
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    *,
    config: _Configuration | None = None,
) -> None:
    """Joins torchrun's ranks, if there are several, seeds, and reads the configuration.

    "nccl" is gloo where there is no GPU, and gloo beside it. Raises ValueError for an unknown or
    refused key.
    """
    places.join(backend if torch.cuda.is_available() else None)
    global_context.load_config(config or {})
    for name in ("benchmark", "deterministic"):
        value = bool(global_context.config.get(f"cudnn_{name}", False))
        setattr(torch.backends.cudnn, name, value)
    torch.manual_seed(seed)


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


class CriterionEngine:
    """A model, its criterion and its optimizer, and the calls of a training loop.

        engine.zero_grad()
        loss = engine.criterion(engine(data), label)
        engine.backward(loss)
        engine.step()

    With gradient accumulation zero_grad() and step() act once in so many calls.
    """

    def __init__(
        self, model: Any, optimizer: ScaledOptimizer, criterion: Callable[..., Any] | None = None
    ) -> None:
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        config = global_context.config
        self._clip_grad_norm = float(config.get("clip_grad_norm", 0.0))
        self._accumulation_steps = int(config.get("gradient_accumulation", 1))
        self._micro_batches = 0  # of this step, whose gradients are there
        self.train, self.eval = model.train, model.eval

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def zero_grad(self) -> None:
        """Clears gradients; not between the micro-batches of a step."""
        if self._micro_batches == 0:
            self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of a micro-batch, whose loss is divided by their number."""
        self._micro_batches += 1
        several = self._accumulation_steps > 1
        self.optimizer.backward(loss / self._accumulation_steps if several else loss)

    def step(self) -> bool:
        """Clips and updates; False if an overflow skips the step, or if it only counts."""
        if self._micro_batches < self._accumulation_steps:
            return False
        self._micro_batches = 0
        self.optimizer.clip_grad_norm(self.model, self._clip_grad_norm)
        done = self.optimizer.step()
        self.optimizer.zero_grad()
        return done is not False


Engine = CriterionEngine  # as ColossalAI names it


def initialize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., torch.Tensor] | None = None,
    train_dataloader: Iterable[Any] | None = None,
    test_dataloader: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    ophooks: Any = None,
    verbose: bool = True,
) -> tuple[CriterionEngine, Any, Any, Any]:
    """Makes the engine that the configuration of colossalai.launch() describes.

    The model was built inside ZeroInitContext, or outside; the optimizer is as of
    ShardedOptimizerV2. Loaders and scheduler come back as they are, behind the engine.

    Raises ValueError for an unknown key or argument, with the nearest name; and as
    hetero.initialize().
    """
    log_given("initialize", "the engine's hooks move parameters", ophooks=ophooks)
    zero = global_context.config.get("zero")
    if zero is None:  # plain data parallelism there
        zero = {"model_config": {"dtype": "fp32", "zero_stage": 1}}
    refuse_unknown("zero", zero, ["model_config", "optimizer_config"])
    wrapped = ShardedModelV2(model, **zero.get("model_config", {}))
    scaled = ShardedOptimizerV2(wrapped, optimizer, **zero.get("optimizer_config", {}))
    engine = CriterionEngine(wrapped, scaled, criterion)
    return engine, train_dataloader, test_dataloader, lr_scheduler


class DistributedLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger of the standard library, whose messages may be for some ranks alone."""

    def log(self, level: int, msg: object, *args: Any, **more: Any) -> None:
        """Logs on the given `ranks`; by default on all."""
        among = more.pop("ranks", None)
        if among is None or places.rank() in among:
            super().log(level, msg, *args, **more)

    set_level = logging.LoggerAdapter.setLevel

    def log_to_file(
        self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None
    ) -> None:
        """Messages of `level` also go to a file of this rank in the folder `path`, which is made.

        The file's name ends with `suffix`, and it is opened with `mode`.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        name = f"rank_{places.rank()}{'' if suffix is None else '_' + suffix}.log"
        handler = logging.FileHandler(Path(path) / name, mode)
        handler.setLevel(level)
        self.logger.addHandler(handler)


@functools.cache
def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """The logger of this name; the same object each time."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    if not logging.getLogger().handlers and not logger.handlers:
        handler = logging.StreamHandler()
        form = "[%(asctime)s] %(name)s %(levelname)s: %(message)s"
        handler.setFormatter(logging.Formatter(form))
        logger.addHandler(handler)
    return DistributedLogger(logger, {})


def disable_existing_loggers(
    include: Sequence[str] | None = None, exclude: Sequence[str] = ("colossalai", "hetero.compat")
) -> None:
    """Loggers that exist, or those of `include`, log errors alone; `exclude` stay as they are."""
    found = logging.root.manager.loggerDict.items()
    existing = [name for name, logger in found if isinstance(logger, logging.Logger)]
    for name in existing if include is None else include:
        if name not in exclude:
            logging.getLogger(name).setLevel(logging.ERROR)


def get_current_device() -> torch.device:
    """torch's current CUDA device, or the CPU."""
    has_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def is_main_process() -> bool:
    """Whether this is the first rank."""
    return places.rank() == 0


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    **options: Any,
) -> DataLoader[Any]:
    """A loader of this rank's part of a dataset; with add_sampler=False of all.

    `seed` is that of the order, the same on all ranks; `options` as of torch.utils.data.DataLoader.
    """
    options["generator"] = torch.Generator().manual_seed(seed)
    if add_sampler:
        return places.loader(dataset, shuffle, seed, **options)
    return DataLoader(dataset, shuffle=shuffle, **options)
