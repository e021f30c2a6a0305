"""Plain data as JSON and tensors: numbers, strings, lists, dicts, tensors. Never code.

What state_dict() gives of schedulers, GradScaler, samplers and loaders is plain data. What JSON has
not is an object with one key that begins with a dollar sign: {"$tuple": [...]}, {"$tensor": 3}.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from offload.errors import CheckpointError

_DEEPEST = 100  # levels, of either direction; recursion ends before Python's own limit
_PLAIN = (type(None), bool, int, str)


def pack(value: Any, name: str, tensors: list[torch.Tensor]) -> Any:
    """`value` as what json.dumps() takes; tensors in it go to the end of `tensors`, as they are.

    `name` is what errors call it.

    Raises:
        ValueError: something in it is no plain data; the message has its place.
    """
    return _Packing(tensors).pack(value, name, 0)


class _Packing:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def pack(self, value: Any, at: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError(f"{at} is more than {_DEEPEST} levels deep, or contains itself")
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, at)
        if isinstance(value, (np.ndarray, np.generic)):
            return {"$numpy": self._array(np.asarray(value), at)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        if kind is list:
            return self._items(value, at, depth)
        if kind in (tuple, torch.Size):
            return {"$tuple": self._items(value, at, depth)}
        if kind in _MAPPINGS:
            return self._mapping(value, at, depth)
        raise ValueError(
            f"{at} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
            f"have: it keeps numbers, strings, bytes, tensors, arrays, and lists, tuples and dicts "
            f"of them, and of objects that have state_dict() what that gives"
        )

    def _tensor(self, value: torch.Tensor, at: str) -> dict[str, int]:
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise ValueError(f"{at} is a tensor without plain memory; give a dense copy of it")
        self._tensors.append(value)
        return {"$tensor": len(self._tensors) - 1}

    def _array(self, value: np.ndarray[Any, Any], at: str) -> Any:
        try:
            return self._tensor(torch.from_numpy(value), at)
        except TypeError as error:
            raise ValueError(f"{at} is an array of {value.dtype}: {error}") from None

    def _items(self, values: Any, at: str, depth: int) -> list[Any]:
        return [self.pack(v, f"{at}[{i}]", depth + 1) for i, v in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], at: str, depth: int) -> Any:
        packed = {k: self.pack(v, f"{at}[{k!r}]", depth + 1) for k, v in value.items()}
        kind = _MAPPINGS[type(value)]
        if kind is None and all(type(key) is str and not key.startswith("$") for key in packed):
            return packed
        pairs = [
            [self.pack(key, f"the key {key!r} of {at}", depth + 1), found]
            for key, found in packed.items()
        ]
        return {kind or "$dict": pairs}


def unpack(packed: Any, name: str, tensor: Callable[[int], torch.Tensor]) -> Any:
    """What pack() was given; `tensor` gives the tensor of a number.

    Raises:
        CheckpointError: it is nothing that pack() gives; `name` is what it is called.
    """
    try:
        return _unpack(packed, name, tensor, 0)
    except (TypeError, ValueError, OverflowError, binascii.Error) as error:
        raise CheckpointError(f"{name} is no plain data: {error}") from None


def _unpack(packed: Any, at: str, tensor: Callable[[int], torch.Tensor], depth: int) -> Any:
    if depth > 2 * _DEEPEST + 2:
        raise CheckpointError(f"{at} is nested too deeply")
    if type(packed) in _PLAIN or type(packed) is float:
        return packed
    if isinstance(packed, list):
        return [_unpack(v, f"{at}[{i}]", tensor, depth + 1) for i, v in enumerate(packed)]
    if not isinstance(packed, dict):
        raise CheckpointError(f"{at} is {packed!r}")
    tag = next(iter(packed), "")
    if not tag.startswith("$"):
        return {k: _unpack(v, f"{at}[{k!r}]", tensor, depth + 1) for k, v in packed.items()}
    if len(packed) != 1 or tag not in _TAGS:
        raise CheckpointError(f"{at} has {sorted(packed)[:3]}, which this version does not know")
    content = packed[tag]
    if tag == "$tensor":
        if type(content) is not int:
            raise CheckpointError(f"{at} has the tensor {content!r}, must be a number")
        return tensor(content)
    inner = _unpack(content, at, tensor, depth + 1)
    return _TAGS[tag](inner)


def _of_pairs(kind: Callable[..., Any]) -> Callable[[Any], Any]:
    def make(pairs: Any) -> Any:
        if not (isinstance(pairs, list) and all(isinstance(p, list) for p in pairs)):
            raise ValueError("pairs of keys and values are wanted")
        return kind(dict(pairs))

    return make


def _special_float(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text!r} is none of nan, inf and -inf")
    return float(text)


def _numpy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise ValueError("an array's tensor is missing")
    found = value.numpy()
    return found[()] if found.ndim == 0 else found


def _dtype(name: Any) -> torch.dtype:
    found = _DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"{name!r} is no dtype of torch's")
    return found


def _tuple(values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise ValueError("a tuple's values are missing")
    return tuple(values)


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

# By the class of a mapping how it is tagged; None: as JSON's objects, where keys allow it.
_MAPPINGS: dict[type, str | None] = {
    dict: None,
    OrderedDict: "$ordered_dict",
    Counter: "$counter",
}

_TAGS: dict[str, Callable[[Any], Any]] = {
    "$float": _special_float,
    "$tensor": lambda value: value,
    "$numpy": _numpy,
    "$bytes": _bytes,
    "$dtype": _dtype,
    "$tuple": _tuple,
    "$dict": _of_pairs(dict),
    "$ordered_dict": _of_pairs(OrderedDict),
    "$counter": _of_pairs(Counter),
}
