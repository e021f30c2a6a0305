"""What becomes of each key of another project's configuration.

Vocabulary: a key is *taken* (honoured: it does here what it does there; or mapped to an option of
hetero that says the same in other words; docs/compatibility.md has which), *not needed* (accepted,
and the reason is logged once), or *refused* (training would be another one without it; only a value
that switches it off is accepted).
"""

from __future__ import annotations

import difflib
import logging
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from inspect import Parameter, Signature, signature
from types import MappingProxyType
from typing import Any, NamedTuple

from hetero.config import option_names

logger = logging.getLogger("hetero.compat")
_logged: set[tuple[str, str]] = set()


class Treatment(Enum):
    """The fate of a key."""

    TAKEN = "taken"
    NOT_NEEDED = "not needed"
    REFUSED = "refused"


class Key(NamedTuple):
    """One key: its treatment, and why it is not needed or refused."""

    treatment: Treatment
    reason: str = ""


_NONE: Mapping[str, Any] = MappingProxyType({})


class KeyTable:
    """The keys of one mapping, as errors and messages `name` it ("zero_optimization").

    `taken` has names, with spaces between; `not_needed` and `refused` have names for each reason.
    `others` are keys of another table. `aliases` are other spellings.
    """

    def __init__(
        self,
        name: str,
        taken: str = "",
        not_needed: Mapping[str, str] = _NONE,
        refused: Mapping[str, str] = _NONE,
        *,
        aliases: Mapping[str, str] = _NONE,
        others: Mapping[str, Key] = _NONE,
    ) -> None:
        self.name, self.aliases = name, aliases
        self.keys = dict.fromkeys(taken.split(), Key(Treatment.TAKEN))
        for kind, reasons in ((Treatment.NOT_NEEDED, not_needed), (Treatment.REFUSED, refused)):
            for reason, names in reasons.items():
                self.keys |= dict.fromkeys(names.split(), Key(kind, reason))
        self.keys |= others

    def read(self, given: object, known: Sequence[str] = ()) -> dict[str, Any]:
        """The values of taken keys, under their usual names; None is no value.

        Logs once, in the logger "hetero.compat", each key that is not needed. The error about an
        unknown key tells of the `known` ones, too.

        Raises:
            ValueError: `given` is no mapping; a key is unknown, refused, or given under two names.
        """
        if not isinstance(given, Mapping):
            raise ValueError(f"{self.name} must be a mapping of keys to values, not {given!r}")
        refuse_unknown(self.name, given, [*self.keys, *self.aliases, *known])
        values: dict[str, Any] = {}
        for spelling, value in given.items():
            name = self.aliases.get(spelling, spelling)
            key = self.keys[name]
            if value is None:
                continue
            if key.treatment is Treatment.REFUSED:
                if not _is_off(value):
                    said = f"{spelling}={reprlib.repr(value)}"
                    raise ValueError(f"{self.name}: {said} is refused: {key.reason}")
            elif key.treatment is Treatment.NOT_NEEDED:
                log_not_needed(f"{self.name}: {spelling}", key.reason)
            elif values.setdefault(name, value) != value:
                raise ValueError(
                    f"{self.name}: {name} is given under two names, with {values[name]!r} and "
                    f"{value!r}; give it once"
                )
        return values

    def read_call(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """As read(), for the arguments of a call; options of hetero among them come second."""
        options = [name for name in option_names() if name not in self.keys]
        own = {name: value for name, value in given.items() if name in options}
        rest = {name: value for name, value in given.items() if name not in options}
        return self.read(rest, options), own


class DeclaresArguments:
    """A class whose constructor takes `*args, **kwargs`; a lambda in its statement declares them.

    class Scale(DeclaresArguments, arguments=lambda factor, offset=0.0: None): ...
    """

    _signature: Signature

    def __init_subclass__(cls, arguments: Callable[..., None] | None = None) -> None:
        super().__init_subclass__()
        if arguments is not None:
            cls._signature = cls.__signature__ = signature(arguments)  # type: ignore[attr-defined]

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by their names, and defaults. Raises TypeError as any call does."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}(): {error}") from None
        bound.apply_defaults()
        given: dict[str, Any] = dict(bound.arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                given |= given.pop(name)
        return given


def log_not_needed(what: str, reason: str) -> None:
    """Logs once in a process, on the first rank, that `what` is accepted and not needed."""
    log_once(f"{what} is not needed here, because", reason, ending="")


def log_given(call: str, reason: str, **given: object) -> None:
    """Logs each argument of a call that is given (not None, not False) as not needed."""
    for name, value in given.items():
        if value is not None and value is not False:
            log_not_needed(f"{call}: {name}", reason)


def log_once(what: str, said: str, ending: str = ":") -> None:
    """Logs once in a process, on the first rank, `said` about `what`."""
    if (what, said) not in _logged and os.environ.get("RANK", "0") == "0":
        _logged.add((what, said))
        logger.warning("%s%s %s", what, ending, said)


forget_logged = _logged.clear  # everything is logged anew; for tests


def refuse_unknown(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ValueError for a name in `given` that is not `known`, with the nearest one."""
    for name in given:
        if name not in known:
            raise ValueError(f"unknown key {name!r} in {where}; {nearest(str(name), known)}")


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
    return named or (isinstance(value, (set, list, tuple)) and not value)
