"""colossalai.logging: loggers that say on which ranks they speak."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from hetero.compat.ranks import rank

_loggers: dict[str, DistributedLogger] = {}


class DistributedLogger:
    """A logger of the standard library whose messages are of some ranks only."""

    def __init__(self, name: str) -> None:
        """`name` of the logger of the standard library."""
        self._logger = logging.getLogger(name)
        self._logger.setLevel(logging.INFO)
        if not logging.getLogger().handlers and not self._logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(
                logging.Formatter("[%(asctime)s] %(name)s %(levelname)s: %(message)s")
            )
            self._logger.addHandler(handler)

    def set_level(self, level: str) -> None:
        """ "INFO", "DEBUG", "WARNING" or "ERROR". Raises ValueError for others."""
        self._logger.setLevel(level)

    def log_to_file(
        self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None
    ) -> None:
        """Messages also go to a file of this rank in the folder `path`.

        Args:
            path: of the folder, which is made.
            mode: "a" or "w".
            level: from which on.
            suffix: of the file's name.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{rank()}{'' if suffix is None else '_' + suffix}.log"
        handler = logging.FileHandler(folder / name, mode)
        handler.setLevel(level)
        self._logger.addHandler(handler)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Logs on the given ranks; None: on all."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Logs on the given ranks; None: on all."""
        self._log(logging.WARNING, message, ranks)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Logs on the given ranks; None: on all."""
        self._log(logging.DEBUG, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Logs on the given ranks; None: on all."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or rank() in ranks:
            self._logger.log(level, message)


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """The logger of this name; the same object each time."""
    if name not in _loggers:
        _loggers[name] = DistributedLogger(name)
    return _loggers[name]


def disable_existing_loggers(
    include: Sequence[str] | None = None, exclude: Sequence[str] = ("colossalai", "hetero.compat")
) -> None:
    """Loggers that exist say errors only from now on.

    Args:
        include: the names. Default: all.
        exclude: names that stay as they are.
    """
    if include is None:
        found = logging.root.manager.loggerDict.items()
        include = [name for name, logger in found if isinstance(logger, logging.Logger)]
    for name in include:
        if name not in exclude:
            logging.getLogger(name).setLevel(logging.ERROR)
