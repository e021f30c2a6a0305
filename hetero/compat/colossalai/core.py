"""colossalai.core: the configuration of this process, as the launch has read it."""

from __future__ import annotations

import difflib
import runpy
from collections.abc import Mapping
from os import PathLike
from typing import Any

from hetero.compat import ranks
from hetero.compat.colossalai.argument_keys import CONFIGURATION


class Options(dict[str, Any]):
    """A mapping whose keys are attributes, too, inside of others as well."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        """Copies `given`."""
        super().__init__()
        for name, value in (given or {}).items():
            self[name] = Options(value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r}") from None


class GlobalContext:
    """What the process knows of itself.

    Attributes:
        config: the configuration.
    """

    def __init__(self) -> None:
        self.config = Options()

    def load_config(self, config: Mapping[str, Any] | str | PathLike[str]) -> None:
        """Reads a configuration, or a Python file of one.

        Raises ValueError for a key that is refused, and for one that is nearly one of ColossalAI's;
        all others are the user's own.
        """
        given: Mapping[str, Any]
        if isinstance(config, Mapping):
            given = config
        else:
            found = runpy.run_path(str(config))
            given = {name: v for name, v in found.items() if not name.startswith("__")}
        known = list(CONFIGURATION.keys)
        for name in given:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if name not in known and near:
                raise ValueError(
                    f"unknown key {name!r} in {CONFIGURATION.name}; did you mean {near[0]}?"
                )
        CONFIGURATION.read({name: given[name] for name in known if name in given})
        self.config = Options(given)

    def get_global_rank(self) -> int:
        """This rank's number."""
        return ranks.rank()

    def get_world_size(self, parallel_mode: object = None) -> int:
        """The number of ranks."""
        return ranks.ranks()


global_context = GlobalContext()
