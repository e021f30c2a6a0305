"""Arguments of another project's classes, which a class statement declares in their order."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any

REQUIRED = Parameter.empty


def signature_of(arguments: Mapping[str, Any]) -> Signature:
    """The signature with these arguments and defaults; `**name` takes all others."""
    return Signature(
        [
            Parameter(name[2:], Parameter.VAR_KEYWORD)
            if name.startswith("**")
            else Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in arguments.items()
        ]
    )


def given_arguments(
    kind: type, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of `kind` that were given, by their names.

    Raises TypeError as any call does.
    """
    try:
        given: dict[str, Any] = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise TypeError(f"{kind.__name__}(): {error}") from None
    for name, parameter in signature.parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given
