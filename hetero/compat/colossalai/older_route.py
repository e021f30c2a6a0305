"""ColossalAI's older route: launch() reads a configuration, initialize() makes an engine of it.

The names of colossalai.core, engine, trainer, logging and utils are here; arguments are
ColossalAI's, and those that have no effect are named in the log of hetero.compat.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import logging
import os
import runpy
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hetero.compat import ranks as places
from hetero.compat.colossalai.argument_keys import CONFIGURATION
from hetero.compat.colossalai.zero import ScaledOptimizer, ShardedModelV2, ShardedOptimizerV2
from hetero.compat.key_table import log_not_needed, refuse_unknown
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
        return places.rank()

    def get_world_size(self, parallel_mode: object = None) -> int:
        """The number of ranks."""
        return places.ranks()


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

    "nccl" is gloo where there is no GPU, and gloo beside it. Raises ValueError for an unknown or
    refused key.
    """
    places.join(backend if torch.cuda.is_available() else None)
    global_context.load_config(config or {})
    for name in ("benchmark", "deterministic"):
        value = bool(global_context.config.get(f"cudnn_{name}", False))
        setattr(torch.backends.cudnn, name, value)
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

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return bool(self.model.training)

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
) -> tuple[CriterionEngine, Any, Any, Any]:
    """Makes the engine that the configuration of colossalai.launch() describes.

    The model was built inside ZeroInitContext, or outside; the optimizer is as of
    ShardedOptimizerV2. Loaders and scheduler come back as they are, behind the engine.

    Raises ValueError for an unknown key or argument, with the nearest name; and as
    hetero.initialize().
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
    engine = CriterionEngine(wrapped, scaled, criterion)
    return engine, train_dataloader, test_dataloader, lr_scheduler


class Hook:
    """Calls of a training; each does nothing here.

    after_train_iter() and after_test_iter() get the trainer, output, label and loss, and all others
    the trainer. Hooks of smaller `priority` are called first.
    """

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def _ignore(self, trainer: EpochTrainer, *_: Any) -> None:
        """Does nothing."""

    before_train = after_train = before_train_epoch = after_train_epoch = _ignore
    before_train_iter = before_test_epoch = after_test_epoch = _ignore
    after_train_iter = after_test_iter = _ignore


class LossHook(Hook):
    """Keeps the mean loss of the epoch in trainer.states["loss"], and "test_loss"."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self._losses: list[torch.Tensor] = []

    def _begin(self, trainer: EpochTrainer, *_: Any) -> None:
        self._losses = []

    def _add(self, trainer: EpochTrainer, *found: Any) -> None:
        self._losses.append(found[-1].detach().float())

    def _end(self, trainer: EpochTrainer, *_: Any) -> None:
        name = "loss" if trainer.engine.training else "test_loss"
        trainer.states[name] = float(torch.stack(self._losses).mean())

    before_train_epoch = before_test_epoch = _begin
    after_train_iter = after_test_iter = _add
    after_train_epoch = after_test_epoch = _end


class LRSchedulerHook(Hook):
    """Steps a scheduler at the end of each epoch (by_epoch), or after each update."""

    def __init__(self, lr_scheduler: Any, by_epoch: bool, priority: int = 1) -> None:
        super().__init__(priority)
        self._scheduler, self._by_epoch = lr_scheduler, by_epoch

    def after_train_iter(self, trainer: EpochTrainer, *_: Any) -> None:
        if not self._by_epoch and trainer.was_stepped:
            self._scheduler.step()

    def after_train_epoch(self, trainer: EpochTrainer, *_: Any) -> None:
        if self._by_epoch:
            self._scheduler.step()


class LogMetricByEpochHook(Hook):
    """Logs trainer.states at the end of each `interval` epochs."""

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self._logger, self._interval = logger, interval

    def after_train_epoch(self, trainer: EpochTrainer, *_: Any) -> None:
        if (trainer.cur_epoch + 1) % self._interval == 0:
            said = ", ".join(f"{name}={value:.6g}" for name, value in trainer.states.items())
            self._logger.info(f"epoch {trainer.cur_epoch}: {said}", ranks=[0])


hooks = SimpleNamespace(
    BaseHook=Hook,
    LossHook=LossHook,
    LRSchedulerHook=LRSchedulerHook,
    LogMetricByEpochHook=LogMetricByEpochHook,
)


class EpochTrainer:
    """Trains an engine of colossalai.initialize() over epochs.

    Attributes:
        states: values that hooks have found.
        cur_epoch, cur_step: the epoch, and the micro-batch in the training, that run now.
        was_stepped: whether the last micro-batch ended with an update.
    """

    def __init__(self, engine: CriterionEngine, timer: Any = None, logger: Any = None) -> None:
        if timer is not None:
            log_not_needed("Trainer: timer", "optimizer.engine.explain() says where time goes")
        self.engine, self.logger = engine, logger
        self.states: dict[str, float] = {}
        self.cur_epoch = self.cur_step = 0
        self.was_stepped = False
        self._hooks: list[Hook] = []

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[Hook] = (),
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Trains over `epochs`, of which each batch is (data, label), and calls the hooks.

        It ends after max_steps micro-batches, if they are given, and evaluates by test_dataloader
        after each test_interval epochs.
        """
        if display_progress:
            log_not_needed("Trainer.fit: display_progress", "hooks say what happens")
        self._hooks = sorted(hooks, key=lambda hook: hook.priority)
        self._call("before_train")
        for self.cur_epoch in range(epochs):
            self._pass(train_dataloader, "train", max_steps)
            if test_dataloader is not None and (self.cur_epoch + 1) % test_interval == 0:
                self._pass(test_dataloader, "test", None)
            if max_steps is not None and self.cur_step >= max_steps:
                break
        self._call("after_train")

    def _call(self, name: str, *given: Any) -> None:
        for hook in self._hooks:
            getattr(hook, name)(self, *given)

    def _pass(self, data: Iterable[Any], kind: str, max_steps: int | None) -> None:
        """One pass over the data, "train" or "test"."""
        trains = kind == "train"
        (self.engine.train if trains else self.engine.eval)()
        self._call(f"before_{kind}_epoch")
        with torch.set_grad_enabled(trains):
            for batch in data:
                if trains:
                    self._call("before_train_iter")
                    self.engine.zero_grad()
                found = self.engine.execute_schedule(batch)
                if trains:
                    self.was_stepped = self.engine.step()
                    self.cur_step += 1
                self._call(f"after_{kind}_iter", *found)
                if trains and max_steps is not None and self.cur_step >= max_steps:
                    break
        self._call(f"after_{kind}_epoch")


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
    drop_last: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """A loader of this rank's part of a dataset; with add_sampler=False of all.

    `seed` is that of the order, the same on all ranks; `options` as of torch.utils.data.DataLoader.
    """
    sampler: Any = None
    if add_sampler and places.ranks() > 1:
        sampler = DistributedSampler(dataset, places.ranks(), places.rank(), shuffle, seed)
    return DataLoader(
        dataset,
        shuffle=shuffle and sampler is None,
        sampler=sampler,
        drop_last=drop_last,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


Engine, Trainer = CriterionEngine, EpochTrainer  # as ColossalAI names them
