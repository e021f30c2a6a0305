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
from hetero.checkpoint.json_density import check_density
from hetero.checkpoint.safetensors_header import DTYPES
from hetero.state.loss_scale import LossScale
from offload._native import crc32c
from offload.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "hetero checkpoint"
VERSION = 1
_NO_CHECKSUM = "00000000"
_LARGEST = 2**62  # of any number in it
_LAST_STEP = 2**53  # up to which a float counts
# Of the file, which is read at once, and in Python may take thirty times that. Tensors and
# parameters have some 400 bytes each in it.
_MOST_BYTES = 100_000_000
_MOST_SIZES = 64  # of a tensor: numpy and torch's loops have no more
_MOST_TENSOR_BYTES = 2**63 - 1  # what torch counts bytes with
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", re.ASCII)
_STATE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class TensorRecord:
    """Shape and dtype of a tensor that pieces in the data files make up."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


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
    loss_scale: Mapping[str, float] | None
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
            "tensors": {
                key: [dtype_name(tensor.dtype), *tensor.shape]
                for key, tensor in self.tensors.items()
            },
            "ranks": list(self.ranks),
        }
        text = _lines(content).encode()
        checksum = f'"crc32c": "{_checksum(text):08x}"'.encode()
        if len(text) > _MOST_BYTES:
            raise ValueError(
                f"{NAME} would have {len(text)} bytes, and may have {_MOST_BYTES}; give large data "
                f"of `extra` as tensors, which are not in it"
            )
        return text.replace(_CHECKSUM_FIELD, checksum, 1)


def _lines(content: Mapping[str, Any]) -> str:
    """JSON with a line for each member, and for each member of those that are objects."""

    def line(value: Any) -> str:
        return json.dumps(value, allow_nan=False)

    def member(name: str, value: Any) -> str:
        if not isinstance(value, dict) or not value:
            return f"{line(name)}: {line(value)}"
        inner = ",\n  ".join(f"{line(key)}: {line(each)}" for key, each in value.items())
        return f"{line(name)}: {{\n  {inner}\n }}"

    return "{\n " + ",\n ".join(member(name, value) for name, value in content.items()) + "\n}\n"


_CHECKSUM_FIELD = f'"crc32c": "{_NO_CHECKSUM}"'.encode()


def _checksum(content: bytes) -> int:
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return crc32c(memory.data_ptr(), len(content))


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
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise CheckpointError(f"{path} is not a regular file")
    try:
        nbytes = path.stat().st_size
        content = path.read_bytes() if nbytes <= _MOST_BYTES else b""
    except OSError as error:
        raise CheckpointError(
            f"{folder} is no checkpoint: {NAME} cannot be read: {error.strerror}"
        ) from error
    if nbytes > _MOST_BYTES:
        raise CheckpointError(f"{path} has {nbytes} bytes, and may have {_MOST_BYTES}")
    return parse_manifest(content, str(path))


def parse_json(content: bytes, path: str) -> Fields:
    """A file's JSON object. Raises CheckpointError; `path` is the file's, for that."""
    try:
        check_density(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    try:
        found = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is no JSON: {error}") from None
    return Fields(path, found)


def parse_manifest(content: bytes, path: str) -> Manifest:
    """The manifest whose text this is. Raises as read_manifest()."""
    fields = parse_json(content, path)
    if fields.text("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not of a {FORMAT}, but of {shortened(fields.text('format'))}"
        )
    version = fields.number("version")
    if version != VERSION:
        raise CheckpointError(
            f"{path} is of version {version} of the format, and this hetero reads version "
            f"{VERSION}; read it with the hetero that wrote it, or a later one"
        )
    said = fields.text("crc32c")
    if not re.fullmatch("[0-9a-f]{8}", said):
        raise CheckpointError(f"{path} is damaged: its checksum is {shortened(said)}")
    blank = content.replace(f'"crc32c": "{said}"'.encode(), _CHECKSUM_FIELD, 1)
    if said != f"{_checksum(blank):08x}":
        raise CheckpointError(
            f"{path} is damaged: its checksum is {_checksum(blank):08x}, and it says {said}"
        )
    return _manifest(fields)


def _no_constant(name: str) -> float:
    raise ValueError(f"it has the number {name}")


class Fields:
    """A JSON object whose fields are checked as they are read."""

    def __init__(self, at: str, content: Any) -> None:
        if not isinstance(content, dict):
            raise CheckpointError(f"{at} is {shortened(content)}, must be an object")
        self._at = at
        self.content: dict[str, Any] = content

    def get(self, name: str) -> Any:
        """A field of any type."""
        if name not in self.content:
            raise CheckpointError(f"{self._at} lacks {name!r}")
        return self.content[name]

    def _typed(self, name: str, kind: type, what: str) -> Any:
        value = self.get(name)
        if type(value) is not kind:
            raise CheckpointError(f"{name} in {self._at} is {shortened(value)}, must be {what}")
        return value

    def text(self, name: str) -> str:
        """A string."""
        found: str = self._typed(name, str, "a string")
        return found

    def flag(self, name: str) -> bool:
        """true or false."""
        found: bool = self._typed(name, bool, "true or false")
        return found

    def number(self, name: str) -> int:
        """A whole number, 0 or more."""
        value: int = self._typed(name, int, "a whole number")
        if not 0 <= value <= _LARGEST:
            raise CheckpointError(
                f"{name} in {self._at} is {shortened(value)}, must be 0 to {_LARGEST}"
            )
        return value

    def choice(self, name: str, choices: Sequence[str]) -> Any:
        """One of the strings."""
        found = self.text(name)
        if found not in choices:
            raise CheckpointError(
                f"{name} in {self._at} is {shortened(found)}, must be one of {', '.join(choices)}"
            )
        return found

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, 0 or more."""
        values = self.items(name)
        if not all(type(value) is int and 0 <= value <= _LARGEST for value in values):
            raise CheckpointError(f"{name} in {self._at} must be whole numbers up to {_LARGEST}")
        return tuple(values)

    def items(self, name: str) -> list[Any]:
        """A list."""
        found: list[Any] = self._typed(name, list, "a list")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, each once."""
        values = self.items(name)
        if not all(isinstance(value, str) for value in values) or len(set(values)) < len(values):
            raise CheckpointError(f"{name} in {self._at} must be strings, each once")
        return tuple(values)

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(f"{name}[{i}] in {self._at}", v) for i, v in enumerate(self.items(name))]

    def table(self, name: str) -> dict[str, Any]:
        """An object with any names."""
        found: dict[str, Any] = self._typed(name, dict, "an object")
        return found

    def object_table(self, name: str) -> dict[str, Fields]:
        """An object with objects of any names."""
        return {
            key: Fields(f"{name}[{shortened(key)}] in {self._at}", value)
            for key, value in self.table(name).items()
        }


def shortened(value: object) -> str:
    """It as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _manifest(fields: Fields) -> Manifest:
    files = {}
    for name, file in fields.object_table("files").items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{shortened(name)} is no name of a data file")
        files[name] = WrittenFile(
            file.number("nbytes"), file.number("header_nbytes"), file.number("header_crc32c")
        )
    params = {
        name: ParamRecord(param.texts("aliases"), param.flag("trained"), param.number("step"))
        for name, param in fields.object_table("params").items()
    }
    tensors = {key: tensor_record(key, found) for key, found in fields.table("tensors").items()}
    optimizers = tuple(
        OptimizerRecord(
            each.text("name"),
            each.texts("states"),
            each.text("state_dtype"),
            tuple(
                GroupRecord(group.get("options"), group.texts("params"))
                for group in each.objects("groups")
            ),
        )
        for each in fields.objects("optimizers")
    )
    made = Manifest(
        step=fields.number("step"),
        files=files,
        tensors=tensors,
        params=params,
        buffers=fields.texts("buffers"),
        optimizers=optimizers,
        loss_scale=_loss_scale(fields),
        ranks=tuple(fields.items("ranks")),
    )
    _check(made)
    return made


def tensor_record(key: str, found: Any) -> TensorRecord:
    """What the manifest says of a tensor: a dtype and sizes. Raises CheckpointError."""
    at = f"tensor {shortened(key)}"
    sizes = found[1:] if isinstance(found, list) else []
    good = isinstance(found, list) and found and isinstance(found[0], str)
    if not good or not all(type(n) is int and 0 <= n <= _LARGEST for n in sizes):
        raise CheckpointError(f"{at} is {shortened(found)}, must be a dtype and sizes")
    dtype = _DTYPES.get(found[0])
    if dtype is None:
        raise CheckpointError(f"{at} has the dtype {shortened(found[0])}, which is unknown")
    # (torch multiplies the other sizes of an empty tensor, too.)
    most = math.prod(max(size, 1) for size in sizes[:_MOST_SIZES])
    if len(sizes) > _MOST_SIZES or most * dtype.itemsize > _MOST_TENSOR_BYTES:
        raise CheckpointError(f"{at} has the shape {shortened(sizes)}, which no tensor can have")
    return TensorRecord(tuple(sizes), dtype)


def _loss_scale(fields: Fields) -> Mapping[str, float] | None:
    if fields.get("loss_scale") is None:
        return None
    found = fields.table("loss_scale")
    if set(found) != {field.name for field in dataclass_fields(LossScale)}:
        raise CheckpointError(f"loss_scale has the fields {shortened(sorted(found))}")
    for name, value in found.items():
        kinds = (int, float) if name == "value" else (int,)
        if type(value) not in kinds or not (name == "value") <= value <= _LAST_STEP**2:
            raise CheckpointError(f"loss_scale has {name} = {shortened(value)}")
    return found


def _check(manifest: Manifest) -> None:
    """Raises CheckpointError if parts of it contradict each other."""
    tensors = manifest.tensors
    for name in manifest.buffers:
        if f"model/{name}" not in tensors:
            raise CheckpointError(f"the manifest has the buffer {name!r}, and no tensor of it")
        if name in manifest.params:
            raise CheckpointError(f"the manifest has {name!r} as a parameter and as a buffer")
    for name, param in manifest.params.items():
        record = tensors.get(f"model/{name}")
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


def check_state(manifest: Manifest, name: str, state: str) -> None:
    """Raises CheckpointError unless the state of a parameter is there, in its shape."""
    record = manifest.tensors.get(f"optimizer/{name}/{state}")
    if record is None or record.shape != manifest.tensors[f"model/{name}"].shape:
        raise CheckpointError(f"the state {shortened(state)} of {name!r} is not there in its shape")
    if record.dtype not in _STATE_DTYPES:
        raise CheckpointError(f"the state {shortened(state)} of {name!r} is {record.dtype}")
