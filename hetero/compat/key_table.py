"""What becomes of each key of another project's configuration.

Vocabulary: a key is *honoured* (it does here what it does there), *mapped* (to an option of hetero
that says the same in other words), *not needed* (accepted, and the reason is logged once), or
*refused* (training would be another one without it; only a value that switches it off is accepted).
"""

from __future__ import annotations

import difflib
import logging
import os
import reprlib
from collections.abc import Mapping, Sequence
from enum import Enum
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import Any, NamedTuple

REQUIRED = Parameter.empty
logger = logging.getLogger("hetero.compat")
_logged: set[tuple[str, str]] = set()


class Treatment(Enum):
    """The fate of a key."""

    HONOURED = "honoured"
    MAPPED = "mapped"
    NOT_NEEDED = "not needed"
    REFUSED = "refused"


class Key(NamedTuple):
    """One key: its treatment, and its effect, or why it is not needed or refused."""

    treatment: Treatment
    text: str


class KeyTable:
    """The keys of one mapping.

    Attributes:
        name: the mapping, as errors and messages name it ("zero_optimization").
        keys: by name.
        aliases: other spellings of keys.
    """

    def __init__(
        self,
        name: str,
        honoured: Mapping[str, str] = MappingProxyType({}),
        mapped: Mapping[str, str] = MappingProxyType({}),
        not_needed: Mapping[str, str] = MappingProxyType({}),
        refused: Mapping[str, str] = MappingProxyType({}),
        *,
        aliases: Mapping[str, str] = MappingProxyType({}),
        others: Mapping[str, Key] = MappingProxyType({}),
        order: str = "",
    ) -> None:
        """`honoured` and `mapped` have a text for each key.

        `not_needed` and `refused` have names, with spaces between, for each reason; `others` are
        keys of another table. `order`: the names of all keys, if they are in another order.
        """
        self.name, self.aliases = name, aliases
        keys = {each: Key(Treatment.HONOURED, text) for each, text in honoured.items()}
        keys |= {each: Key(Treatment.MAPPED, text) for each, text in mapped.items()}
        for kind, reasons in ((Treatment.NOT_NEEDED, not_needed), (Treatment.REFUSED, refused)):
            for reason, names in reasons.items():
                keys |= dict.fromkeys(names.split(), Key(kind, reason))
        keys |= others
        self.keys = {each: keys.pop(each) for each in order.split() or list(keys)}
        assert not keys, f"{name}: the order lacks {list(keys)}"

    def read(self, given: object) -> dict[str, Any]:
        """The values of honoured and mapped keys, under their usual names.

        Logs once, in the logger "hetero.compat", each key that is not needed.

        Raises:
            ValueError: `given` is no mapping; a key is unknown, refused, or given under two names.
        """
        if not isinstance(given, Mapping):
            raise ValueError(f"{self.name} must be a mapping of keys to values, not {given!r}")
        values: dict[str, Any] = {}
        for spelling, value in given.items():
            name = self.aliases.get(spelling, spelling)
            key = self.keys.get(name)
            if key is None:
                raise ValueError(
                    f"unknown key {spelling!r} in {self.name}; "
                    f"{nearest(str(spelling), [*self.keys, *self.aliases])}"
                )
            if key.treatment is Treatment.REFUSED:
                if not _is_off(value):
                    said = f"{spelling}={reprlib.repr(value)}"
                    raise ValueError(f"{self.name}: {said} is refused: {key.text}")
            elif key.treatment is Treatment.NOT_NEEDED:
                log_not_needed(f"{self.name}: {spelling}", key.text)
            elif values.setdefault(name, value) != value:
                raise ValueError(
                    f"{self.name}: {name} is given under two names, with {values[name]!r} and "
                    f"{value!r}; give it once"
                )
        return values


class DeclaresArguments:
    """A class whose constructor takes `*args, **kwargs`, and which has declared their names."""

    _signature: Signature

    @classmethod
    def _declare(cls, arguments: Mapping[str, Any]) -> None:
        """Sets the arguments and their defaults; `**name` takes all others."""
        cls._signature = Signature(
            [
                Parameter(name[2:], Parameter.VAR_KEYWORD)
                if name.startswith("**")
                else Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default)
                for name, default in arguments.items()
            ]
        )
        cls.__signature__ = cls._signature  # type: ignore[attr-defined]

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that were given, by their names. Raises TypeError as any call does."""
        try:
            given: dict[str, Any] = dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}(): {error}") from None
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return given


def log_not_needed(what: str, reason: str) -> None:
    """Logs once in a process, on the first rank, that `what` is accepted and not needed."""
    log_once(f"{what} is not needed here, because", reason, ending="")


def log_once(what: str, said: str, ending: str = ":") -> None:
    """Logs once in a process, on the first rank, `said` about `what`."""
    if (what, said) not in _logged and os.environ.get("RANK", "0") == "0":
        _logged.add((what, said))
        logger.warning("%s%s %s", what, ending, said)


def forget_logged() -> None:
    """Everything is logged anew; for tests."""
    _logged.clear()


def refuse_unknown(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ValueError for a name in `given` that is not `known`, with the nearest one."""
    for name in given:
        if name not in known:
            raise ValueError(f"unknown key {name!r} in {where}; {nearest(name, known)}")


def nearest(name: str, known: Sequence[str]) -> str:
    """What an error about an unknown name says of the names that there are."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(sorted(known))}"


def _is_off(value: object) -> bool:
    """Whether a value switches its feature off."""
    if isinstance(value, Mapping):
        return not value.get("enabled", False)
    named = isinstance(value, (str, int, float)) and value in (0, "none", "None")
    empty = isinstance(value, (set, list, tuple)) and not value
    return value is None or named or empty
