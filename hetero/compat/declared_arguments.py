"""Arguments of another project's classes, which are declared by names, order and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any

REQUIRED = Parameter.empty


class DeclaresArguments:
    """A class whose constructor takes `*args, **kwargs` and has declared their names."""

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
