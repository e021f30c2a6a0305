"""What each rank alone has beside the model: the state of random numbers, and `extra`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hetero.checkpoint.plain_data import pack, unpack
from hetero.ranks.process_groups import ProcessGroups
from offload.errors import CheckpointError

Extra = Mapping[str, Any]


def pack_rank_data(extra: Extra, tensors: list[torch.Tensor]) -> Any:
    """Random numbers' state now, and `extra`, as plain data; tensors go to `tensors`.

    Of an object that has state_dict() and load_state_dict() that is kept, of a torch.Generator its
    state; all else must be plain data. Raises ValueError.
    """
    for name in extra:
        if type(name) is not str:
            raise ValueError(f"extra has the key {name!r}, must be a string")
    # (As one value: names that begin with a dollar sign must not be taken for tags.)
    packed = pack({name: _state_of(value) for name, value in extra.items()}, "extra", tensors)
    return {"random": pack(_random_state(), "random numbers", tensors), "extra": packed}


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator) or callable(getattr(value, "state_dict", None)):
        return _saved_state(value)
    return value


def _saved_state(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def unpack_extra(data: Any, tensor: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """What pack_rank_data() was given as `extra`; of objects, their states.

    Raises CheckpointError.
    """
    found = unpack(_part(data, "extra"), "extra", tensor)
    if type(found) is not dict or not all(isinstance(name, str) for name in found):
        raise CheckpointError("extra of the checkpoint must be values by name")
    return found


@dataclass(frozen=True)
class LoopState:
    """What a loop gets back beside the model and its optimizer states.

    Attributes:
        groups: by optimizer and param group, the options.
        random: the state of random numbers; None if they stay as they are.
        extra: as Checkpoint's.
    """

    groups: Sequence[Sequence[Mapping[str, Any]]]
    random: Mapping[str, Any] | None
    extra: Mapping[str, Any]

    def bring_back(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Options and random numbers are as they were. Raises CheckpointError.

        objects_loaded() comes before: objects of `extra` may refuse their states.
        """
        for optimizer, groups in zip(optimizers, self.groups, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(dict(options)))  # (schedulers write to a tensor)
        if self.random is not None:
            set_random(self.random)


def _check_objects(extra: Extra, found: Mapping[str, Any]) -> None:
    """Raises ValueError unless each of `extra` is an object with a state in `found`.

    Raises CheckpointError for states of generators that are none.
    """
    for name, value in extra.items():
        if name not in found:
            raise ValueError(f"the checkpoint has no extra {name!r}; it has {sorted(found)}")
        if isinstance(value, torch.Generator):
            _load(name, torch.Generator(value.device), found[name])
        elif not callable(getattr(value, "load_state_dict", None)):
            raise ValueError(
                f"extra[{name!r}] is a {type(value).__name__} without load_state_dict(); values of "
                f"the checkpoint's extra are in what hetero.load() returns"
            )


@contextmanager
def objects_loaded(
    extra: Extra, found: Mapping[str, Any], world: ProcessGroups, what: str
) -> Iterator[None]:
    """Objects in `extra` have the states of their names in `found` inside the block, and after it.

    What an object or the block raises, here or on another rank, gives them back what they had. All
    ranks call it. Raises CheckpointError, and ValueError for what it cannot load.
    """
    before: dict[str, Any] = {}
    try:
        failure: Exception | None = None
        try:
            _check_objects(extra, found)
            for name, value in extra.items():
                with suppress(Exception):  # what cannot be copied has nothing to go back to
                    before[name] = copy.deepcopy(_saved_state(value))
                _load(name, value, found[name])
        except Exception as error:
            failure = error
        world.all_or_none(failure, f"load the objects of {what}", (CheckpointError,))
        yield
    except BaseException:
        for name, state in before.items():
            with suppress(CheckpointError):
                _load(name, extra[name], state)
        raise


def _load(name: str, value: Any, state: Any) -> None:
    try:
        if isinstance(value, torch.Generator):
            value.set_state(state)
        else:
            value.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"extra[{name!r}], a {type(value).__name__}, does not take the checkpoint's state: "
            f"{type(error).__name__}: {error}"
        ) from error


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    device = torch.get_device_module()
    if torch.accelerator.is_available() and device.is_initialized():
        state["cuda"] = device.get_rng_state_all()  # of whatever kind it is
    return state


def unpack_random(data: Any, tensor: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """The state of random numbers. Raises CheckpointError."""
    found = unpack(_part(data, "random"), "the state of random numbers", tensor)
    if not isinstance(found, dict) or not {"torch", "python", "numpy"} <= set(found):
        raise CheckpointError("the checkpoint has no state of random numbers")
    return found


def check_random(state: Mapping[str, Any]) -> None:
    """Raises CheckpointError if set_random() would; random numbers are as before."""
    with random_stays():
        set_random(state)


@contextmanager
def random_stays() -> Iterator[None]:
    """After the block random numbers go on from where they were before it."""
    before = _random_state()
    try:
        yield
    finally:
        set_random(before)


def set_random(state: Mapping[str, Any]) -> None:
    """Random numbers go on from there. Raises CheckpointError."""
    try:
        _check_numpy(state["numpy"])
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        cuda = state.get("cuda", [])
        if not isinstance(cuda, list):
            raise TypeError(f"of GPUs it is a {type(cuda).__name__}")
        if torch.accelerator.is_available() and len(cuda) == torch.accelerator.device_count():
            torch.get_device_module().set_rng_state_all(cuda)
    except Exception as error:
        raise CheckpointError(f"the state of random numbers is of no use: {error}") from error


def _check_numpy(state: Any) -> None:
    """Raises ValueError for positions outside of numpy's buffers, which it does not look at."""
    if isinstance(state, tuple):
        position, end = state[2], 624  # of the Mersenne Twister
    else:
        position, end = state.get("buffer_pos", 0), 4  # of Philox
        if state["bit_generator"] == "MT19937":
            raise ValueError("numpy's is no tuple")
    if type(position) is not int or not 0 <= position <= end:
        raise ValueError(f"numpy's is at {position!r}, must be 0 to {end}")


def _part(data: Any, name: str) -> Any:
    if not isinstance(data, dict) or name not in data:
        raise CheckpointError(f"the checkpoint's data of a rank lack {name!r}")
    return data[name]
