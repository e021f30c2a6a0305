"""The manifest of a checkpoint: manifest.json, which says what it has and in which files.

docs/formats.md describes it. read_manifest() takes nothing on trust: a file that was cut, changed
or made up is an error that names what is wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint.data_writer import WrittenFile
from hetero.checkpoint.safetensors_header import DTYPES
from hetero.checkpoint.schema import (
    LARGEST,
    content_of,
    crc_of,
    member,
    parse_json,
    shortened,
    typed,
)
from hetero.state.grads import LossScale
from offload.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "hetero checkpoint"
VERSION = 1
_NO_CHECKSUM = "00000000"
_LAST_STEP = 2**53  # up to which a float counts
# Of the file, which is read at once, and in Python may take thirty times that. Tensors and
# parameters have some 400 bytes each in it.
_MOST_BYTES = 100_000_000
_MOST_SIZES = 64  # of a tensor: numpy and torch's loops have no more
_MOST_TENSOR_BYTES = 2**63 - 1  # what torch counts bytes with
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", re.ASCII)


def master_key(name: str) -> str:
    """Of a parameter's master or value, or of a buffer."""
    return f"model/{name}"


def state_key(name: str, state: str) -> str:
    """Of a state of the rule."""
    return f"optimizer/{name}/{state}"


def data_key(rank: int, number: int) -> str:
    """Of a tensor that a rank alone has."""
    return f"data/{rank}/{number}"


def name_of(key: str) -> str:
    """The parameter's name in "model/NAME" and "optimizer/NAME/STATE"."""
    kind, _, rest = key.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


@dataclass(frozen=True)
class TensorRecord:
    """Shape and dtype of a tensor that pieces in the data files make up."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def to_json(self) -> list[Any]:
        """A dtype and sizes."""
        return [dtype_name(self.dtype), *self.shape]

    @classmethod
    def of_json(cls, found: Any, at: str) -> TensorRecord:
        """The record that to_json() was called of. Raises CheckpointError."""
        sizes = found[1:] if isinstance(found, list) else []
        good = isinstance(found, list) and found and isinstance(found[0], str)
        if not good or not all(type(n) is int and 0 <= n <= LARGEST for n in sizes):
            raise CheckpointError(f"{at} is {shortened(found)}, must be a dtype and sizes")
        dtype = _DTYPES.get(found[0])
        if dtype is None:
            raise CheckpointError(f"{at} has the dtype {shortened(found[0])}, which is unknown")
        check_shape(sizes, dtype, at)
        return cls(tuple(sizes), dtype)


def check_shape(sizes: Sequence[int], dtype: torch.dtype, at: str) -> None:
    """Raises CheckpointError if no tensor can have these sizes, which are 0 or more."""
    # (torch multiplies the other sizes of an empty tensor, too.)
    most = math.prod(max(size, 1) for size in sizes[:_MOST_SIZES])
    if len(sizes) > _MOST_SIZES or most * dtype.itemsize > _MOST_TENSOR_BYTES:
        raise CheckpointError(f"{at} has the shape {shortened(sizes)}, which no tensor can have")


@dataclass(frozen=True)
class ParamRecord:
    """A managed parameter: other names that it has in the model, and its number of updates.

    `trained`: it has a master and optimizer state; else its value alone is there.
    """

    aliases: tuple[str, ...]
    trained: bool
    step: int


@dataclass(frozen=True)
class GroupRecord:
    """A param group: its options as plain data, and the names of its parameters in order."""

    options: Any
    params: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer: its class, its rule's states, how they were kept, and its param groups."""

    name: str
    states: tuple[str, ...]
    state_dtype: str
    groups: tuple[GroupRecord, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint has.

    Attributes:
        step: the largest number of updates of a parameter.
        files: the data files by name.
        tensors: all tensors by key: "model/NAME", "optimizer/NAME/STATE", "data/RANK/NUMBER".
        params: the managed parameters, by their first names.
        buffers: names of the model's buffers, and of parameters that cannot be trained.
        optimizers: in the order of hetero.initialize().
        loss_scale: of fp16, by the names of LossScale's fields; None if it is not dynamic.
        ranks: for each rank what it alone has, as plain data: random numbers, `extra`; of a
            checkpoint that was converted none.
    """

    step: int
    files: Mapping[str, WrittenFile]
    tensors: Mapping[str, TensorRecord]
    params: Mapping[str, ParamRecord]
    buffers: Sequence[str]
    optimizers: Sequence[OptimizerRecord]
    loss_scale: Any
    ranks: Sequence[Any] = field(repr=False)

    def to_json(self) -> bytes:
        """The file's content. Raises ValueError if read_manifest() would not take it."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "crc32c": _NO_CHECKSUM,
            "step": self.step,
            "files": {name: asdict(file) for name, file in self.files.items()},
            "params": {name: asdict(param) for name, param in self.params.items()},
            "buffers": list(self.buffers),
            "optimizers": [asdict(optimizer) for optimizer in self.optimizers],
            "loss_scale": self.loss_scale,
            "tensors": {key: tensor.to_json() for key, tensor in self.tensors.items()},
            "ranks": list(self.ranks),
        }
        text = json.dumps(content, allow_nan=False).encode()
        checksum = f'"crc32c": "{crc_of(text):08x}"'.encode()
        if len(text) > _MOST_BYTES:
            raise ValueError(
                f"{NAME} would have {len(text)} bytes, and may have {_MOST_BYTES}; give large data "
                f"of `extra` as tensors, which are not in it"
            )
        return text.replace(_CHECKSUM_FIELD, checksum, 1)


_CHECKSUM_FIELD = f'"crc32c": "{_NO_CHECKSUM}"'.encode()


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in the manifest."""
    return str(dtype).removeprefix("torch.")


# Of those that data files can have.
_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES.values()}


def read_manifest(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, it is of a later version, or it is not as it was written.
    """
    path = folder / NAME
    return parse_manifest(content_of(path, _MOST_BYTES, "checkpoint"), str(path))


def parse_manifest(content: bytes, path: str) -> Manifest:
    """The manifest whose text this is. Raises as read_manifest()."""
    found = parse_json(content, path)
    name = member(found, "format", str, path)
    if name != FORMAT:
        raise CheckpointError(f"{path} is not of a {FORMAT}, but of {shortened(name)}")
    version = member(found, "version", int, path)
    if version != VERSION:
        raise CheckpointError(
            f"{path} is of version {version} of the format, and this hetero reads version "
            f"{VERSION}; read it with the hetero that wrote it, or a later one"
        )
    said = member(found, "crc32c", str, path)
    if not re.fullmatch("[0-9a-f]{8}", said):
        raise CheckpointError(f"{path} is damaged: its checksum is {shortened(said)}")
    blank = content.replace(f'"crc32c": "{said}"'.encode(), _CHECKSUM_FIELD, 1)
    if said != f"{crc_of(blank):08x}":
        raise CheckpointError(
            f"{path} is damaged: its checksum is {crc_of(blank):08x}, and it says {said}"
        )
    made: Manifest = typed(Manifest, found, path)
    _check(made)
    return made


def _check(manifest: Manifest) -> None:
    """Raises CheckpointError if parts of it contradict each other, or cannot be."""
    tensors = manifest.tensors
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{shortened(name)} is no name of a data file")
    _check_loss_scale(manifest.loss_scale)
    for name in manifest.buffers:
        if master_key(name) not in tensors:
            raise CheckpointError(f"the manifest has the buffer {name!r}, and no tensor of it")
        if name in manifest.params:
            raise CheckpointError(f"the manifest has {name!r} as a parameter and as a buffer")
    for name, param in manifest.params.items():
        record = tensors.get(master_key(name))
        if record is None:
            raise CheckpointError(f"the manifest has the parameter {name!r}, and no tensor of it")
        if param.step > _LAST_STEP:
            raise CheckpointError(f"{name!r} has got {param.step} updates, which no one counts")
        if param.trained and record.dtype is not torch.float32:
            raise CheckpointError(f"the master of {name!r} is {record.dtype}, must be fp32")
        if not record.dtype.is_floating_point:
            raise CheckpointError(f"the parameter {name!r} is {record.dtype}, must be floats")
    for optimizer in manifest.optimizers:
        for group in optimizer.groups:
            for name in group.params:
                if name not in manifest.params or not manifest.params[name].trained:
                    continue  # (torch's optimizers may have parameters that cannot be trained)
                for state in optimizer.states:
                    check_state(manifest, name, state)


def _check_loss_scale(found: Any) -> None:
    if found is None:
        return
    names = {field.name for field in dataclass_fields(LossScale)}
    if not isinstance(found, dict) or set(found) != names:
        raise CheckpointError(f"loss_scale has the fields {shortened(found)}")
    for name, value in found.items():
        kinds = (int, float) if name == "value" else (int,)
        if type(value) not in kinds or not (name == "value") <= value <= _LAST_STEP**2:
            raise CheckpointError(f"loss_scale has {name} = {shortened(value)}")


def check_state(manifest: Manifest, name: str, state: str) -> None:
    """Raises CheckpointError unless the state of a parameter is there, in its shape."""
    record = manifest.tensors.get(state_key(name, state))
    if record is None or record.shape != manifest.tensors[master_key(name)].shape:
        raise CheckpointError(f"the state {shortened(state)} of {name!r} is not there in its shape")
    if not record.dtype.is_floating_point:
        raise CheckpointError(f"the state {shortened(state)} of {name!r} is {record.dtype}")
