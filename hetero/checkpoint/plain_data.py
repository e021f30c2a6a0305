"""Plain data as JSON and tensors: numbers, strings, lists, dicts, tensors. Never code.

What state_dict() gives of schedulers, GradScaler, samplers and loaders is plain data. What JSON has
not is an object with one key that begins with a dollar sign: {"$tuple": [...]}, {"$tensor": 3}.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from hetero.checkpoint.safetensors_header import DTYPES
from hetero.checkpoint.schema import shortened
from offload.errors import CheckpointError

_DEEPEST = 64  # levels, of either direction; recursion ends before Python's own limit
_LEVELS_OF_JSON = 3  # that a level becomes at most: {"$dict": [[key, value]]}
_MOST_ALIKE = 100  # keys of one hash, each of which a dict compares with all others
_DECIMAL_BITS = 1024  # of a number that is kept in digits; Python reads no number of any length
# Two halves of a character, which JSON would make one of.
_HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
STORED_DTYPES = frozenset(DTYPES.values())
_PLAIN = (type(None), bool, int, str)


def pack(value: Any, name: str, tensors: list[torch.Tensor]) -> Any:
    """`value` as what json.dumps() takes; tensors in it go to the end of `tensors`, as they are.

    `name` is what errors call it.

    Raises:
        ValueError: something in it is no plain data; the message has its place.
    """
    return _pack(value, (name,), 0, tensors)


_Place = tuple[Any, ...]  # what a value is of, and the keys that lead to it


def _text(at: _Place) -> str:
    """A place as an error says it, where alone it becomes a text: keys may be long, and many."""
    return str(at[0]) + "".join(f"[{shortened(key)}]" for key in at[1:])


def _pack(value: Any, at: _Place, depth: int, tensors: list[torch.Tensor]) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"{_text(at)} is more than {_DEEPEST} levels deep, or contains itself")
    kind = type(value)
    if kind is int and value.bit_length() > _DECIMAL_BITS:
        return {"$int": hex(value)}
    if kind is str and _HALVES.search(value):
        raise ValueError(f"{_text(at)} is {shortened(value)}, which is not Unicode")
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, at, tensors)
    if kind is np.ndarray or isinstance(value, np.generic):
        try:
            # (A copy: torch knows neither read-only arrays nor those that run backwards.)
            array = torch.from_numpy(np.array(value, order="C"))
            packed = _pack_tensor(array, at, tensors)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{_text(at)} is an array of {value.dtype}: {error}") from None
        return {"$numpy" if kind is np.ndarray else "$numpy_scalar": packed}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind in (list, tuple, torch.Size):
        items = [_pack(v, (*at, i), depth + 1, tensors) for i, v in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind in _MAPPINGS:
        return _pack_mapping(value, at, depth, tensors)
    raise ValueError(
        f"{_text(at)} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
        f"have: it keeps numbers, strings, bytes, tensors, arrays, and lists, tuples and dicts "
        f"of them, and of objects that have state_dict() what that gives"
    )


def _pack_tensor(value: torch.Tensor, at: _Place, tensors: list[torch.Tensor]) -> dict[str, int]:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise ValueError(f"{_text(at)} is a tensor without plain memory; give a dense copy of it")
    if value.dtype not in STORED_DTYPES:
        raise ValueError(
            f"{_text(at)} is a tensor of {value.dtype}, which safetensors files do not have; "
            f"convert it"
        )
    tensors.append(value)
    return {"$tensor": len(tensors) - 1}


def _pack_mapping(
    value: Mapping[Any, Any], at: _Place, depth: int, tensors: list[torch.Tensor]
) -> Any:
    packed = {k: _pack(v, (*at, k), depth + 1, tensors) for k, v in value.items()}
    kind = _MAPPINGS[type(value)]
    if kind is None and all(
        type(key) is str and not key.startswith("$") and not _HALVES.search(key) for key in packed
    ):
        return packed
    pairs = []
    for key, found in packed.items():
        where = (f"the key {shortened(key)} of {_text(at)}",)
        pairs.append([_pack(key, where, depth + 1, tensors), found])
    return {kind or "$dict": pairs}


def unpack(packed: Any, name: str, tensor: Callable[[int], torch.Tensor]) -> Any:
    """What pack() was given; `tensor` gives the tensor of a number, which is asked for once.

    Raises:
        CheckpointError: it is nothing that pack() gives; `name` is what it is called.
    """
    asked: set[int] = set()

    def once(number: int) -> torch.Tensor:
        # pack() gives each a number of its own. So what is made is no larger than the files.
        if number in asked:
            raise ValueError(f"the tensor {number} is there twice")
        asked.add(number)
        return tensor(number)

    return _unpack(packed, (name,), once, 0)


def _unpack(packed: Any, at: _Place, tensor: Callable[[int], torch.Tensor], depth: int) -> Any:
    if depth > _LEVELS_OF_JSON * (_DEEPEST + 1):
        raise CheckpointError(f"{_text(at)} is nested too deeply")
    if type(packed) in _PLAIN or type(packed) is float:
        return packed
    if isinstance(packed, list):
        return [_unpack(v, (*at, i), tensor, depth + 1) for i, v in enumerate(packed)]
    if not isinstance(packed, dict):
        raise CheckpointError(f"{_text(at)} is {shortened(packed)}")
    if not any(key.startswith("$") for key in packed):
        return {k: _unpack(v, (*at, k), tensor, depth + 1) for k, v in packed.items()}
    tag = next(iter(packed))
    if len(packed) != 1 or tag not in _TAGS:
        raise CheckpointError(
            f"{_text(at)} has {shortened(sorted(packed)[:3])}, which this version does not know"
        )
    content, (kind, make) = packed[tag], _TAGS[tag]
    if tag != "$tensor":
        content = _unpack(content, at, tensor, depth + 1)
    if not isinstance(content, kind) or isinstance(content, bool):
        raise CheckpointError(
            f"{_text(at)} is no plain data: {tag} of {shortened(content)}, must be of "
            f"{kind.__name__}"
        )
    try:
        return tensor(content) if tag == "$tensor" else make(content)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{_text(at)} is no plain data: {error}") from None


def _of_pairs(kind: Callable[..., Any]) -> Callable[[Any], Any]:
    def make(pairs: Any) -> Any:
        if not all(isinstance(pair, list) for pair in pairs):
            raise ValueError("pairs of keys and values are wanted")
        # (Compared as texts, whose own hashes nobody can foresee.)
        alike = Counter(str(hash(pair[0])) for pair in pairs if pair)
        if max(alike.values(), default=0) > _MOST_ALIKE:
            raise ValueError("its keys were chosen so that a dict of them takes forever")
        return kind(dict(pairs))

    return make


def _special_float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{shortened(text)} is none of nan, inf and -inf")
    return float(text)


def _large_int(text: str) -> int:
    if not re.fullmatch("-?0x[0-9a-f]+", text):
        raise ValueError(f"{shortened(text)} is no whole number in hexadecimal digits")
    return int(text, 16)


def _numpy_scalar(value: torch.Tensor) -> Any:
    if value.ndim:
        raise ValueError(f"a single number has the shape {tuple(value.shape)}")
    return value.numpy()[()]


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"{shortened(name)} is no dtype of torch's")
    return _DTYPES[name]


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

# By the class of a mapping how it is tagged; None: as JSON's objects, where keys allow it.
_MAPPINGS: dict[type, str | None] = {
    dict: None,
    OrderedDict: "$ordered_dict",
    Counter: "$counter",
}

# By tag the type of its content, and the value that becomes of it.
_TAGS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "$int": (str, _large_int),
    "$float": (str, _special_float),
    "$tensor": (int, int),
    "$numpy": (torch.Tensor, torch.Tensor.numpy),
    "$numpy_scalar": (torch.Tensor, _numpy_scalar),
    "$bytes": (str, partial(base64.b64decode, validate=True)),
    "$dtype": (str, _dtype),
    "$tuple": (list, tuple),
    "$dict": (list, _of_pairs(dict)),
    "$ordered_dict": (list, _of_pairs(OrderedDict)),
    "$counter": (list, _of_pairs(Counter)),
}
