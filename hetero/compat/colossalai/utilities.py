"""colossalai.logging and colossalai.utils: what ColossalAI's examples use of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partialmethod
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hetero.compat.ranks import rank
from hetero.compat.ranks import ranks as ranks_of_all


class DistributedLogger:
    """A logger of the standard library, whose messages may be for some ranks alone."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._logger.setLevel(logging.INFO)
        if not logging.getLogger().handlers and not self._logger.handlers:
            handler = logging.StreamHandler()
            form = "[%(asctime)s] %(name)s %(levelname)s: %(message)s"
            handler.setFormatter(logging.Formatter(form))
            self._logger.addHandler(handler)

    def set_level(self, level: str) -> None:
        """Logs from "INFO", "DEBUG", "WARNING" or "ERROR" on. Raises ValueError for others."""
        self._logger.setLevel(level)

    def log_to_file(
        self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None
    ) -> None:
        """Messages of `level` also go to a file of this rank in the folder `path`, which is made.

        The file's name ends with `suffix`, and it is opened with `mode`.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        name = f"rank_{rank()}{'' if suffix is None else '_' + suffix}.log"
        handler = logging.FileHandler(Path(path) / name, mode)
        handler.setLevel(level)
        self._logger.addHandler(handler)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None = None) -> None:
        """Logs on these ranks; None: on all."""
        if ranks is None or rank() in ranks:
            self._logger.log(level, message)

    debug = partialmethod(_log, logging.DEBUG)
    info = partialmethod(_log, logging.INFO)
    warning = partialmethod(_log, logging.WARNING)
    error = partialmethod(_log, logging.ERROR)


@cache
def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """The logger of this name; the same object each time."""
    return DistributedLogger(name)


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
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_main_process() -> bool:
    """Whether this is the first rank."""
    return rank() == 0


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """A loader of this rank's part of a dataset.

    Args:
        dataset: of all ranks.
        shuffle: in another order in each epoch.
        seed: of the order, the same on all ranks.
        add_sampler: False: every rank gets all.
        drop_last: leaves out the last, smaller batch.
        options: further ones of torch.utils.data.DataLoader.
    """
    sampler: Any = None
    if add_sampler and ranks_of_all() > 1:
        sampler = DistributedSampler(dataset, ranks_of_all(), rank(), shuffle, seed)
    return DataLoader(
        dataset,
        shuffle=shuffle and sampler is None,
        sampler=sampler,
        drop_last=drop_last,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
