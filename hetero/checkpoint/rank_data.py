"""What each rank alone has beside the model: the state of random numbers, and `extra`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hetero.checkpoint.plain_data import pack, unpack
from offload.errors import CheckpointError

Extra = Mapping[str, Any]


def pack_rank_data(extra: Extra, tensors: list[torch.Tensor]) -> Any:
    """Random numbers' state now, and `extra`, as plain data; tensors go to `tensors`.

    Of an object that has state_dict() and load_state_dict() that is kept, of a torch.Generator its
    state; all else must be plain data. Raises ValueError.
    """
    packed = {}
    for name, value in extra.items():
        if type(name) is not str:
            raise ValueError(f"extra has the key {name!r}, must be a string")
        packed[name] = pack(_state_of(value), f"extra[{name!r}]", tensors)
    return {"random": pack(_random_state(), "random numbers", tensors), "extra": packed}


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    return value


def unpack_extra(data: Any, tensor: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """What pack_rank_data() was given as `extra`; of objects, their states.

    Raises CheckpointError.
    """
    found = unpack(_part(data, "extra"), "extra", tensor)
    if not isinstance(found, dict):
        raise CheckpointError(f"extra of the checkpoint is {found!r}, must be an object")
    return found


def load_objects(extra: Extra, found: dict[str, Any]) -> None:
    """Objects in `extra` get the states of their names in `found`."""
    for name, value in extra.items():
        if isinstance(value, torch.Generator):
            value.set_state(found[name])
        else:
            value.load_state_dict(found[name])


def check_objects(extra: Extra, found: Mapping[str, Any]) -> None:
    """Raises ValueError unless each of `extra` is an object with a state in `found`."""
    for name, value in extra.items():
        if name not in found:
            raise ValueError(f"the checkpoint has no extra {name!r}; it has {sorted(found)}")
        if not isinstance(value, torch.Generator) and not hasattr(value, "load_state_dict"):
            raise ValueError(
                f"extra[{name!r}] is a {type(value).__name__} without load_state_dict(); values of "
                f"the checkpoint's extra are in what hetero.load() returns"
            )


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def unpack_random(data: Any, tensor: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """The state of random numbers. Raises CheckpointError."""
    found = unpack(_part(data, "random"), "the state of random numbers", tensor)
    if not isinstance(found, dict) or not {"torch", "python", "numpy"} <= set(found):
        raise CheckpointError("the checkpoint has no state of random numbers")
    return found


def set_random(state: Mapping[str, Any]) -> None:
    """Random numbers go on from there. Raises CheckpointError."""
    try:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        cuda = state.get("cuda", [])
        if torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the state of random numbers is of no use: {error}") from error


def _part(data: Any, name: str) -> Any:
    if not isinstance(data, dict) or name not in data:
        raise CheckpointError(f"the checkpoint's data of a rank lack {name!r}")
    return data[name]
