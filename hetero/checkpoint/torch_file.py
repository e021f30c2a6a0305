"""Reads files of torch.save() that have tensors and plain data, and no more than they say.

torch.load(weights_only=True) runs nothing of a file, but takes what it asks for: an archive that
was compressed to a thousandth, a key whose hash takes years, a tensor of 2^36 elements that all are
the same four bytes.

Nine bytes of a pickle can ask for a memo of 2^31 entries, and forty lines for a tuple that has the
same tuple twice, that has another one twice, and so on: its hash or its text takes years. So the
opcodes of a pickle are followed before anything is loaded, with the number of objects in the place
of each object.
"""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from offload.errors import CheckpointError

# What DCP's and torch.save()'s pickles have, of any protocol from 2 on, and no other opcodes.
_LEAVES = {
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "GLOBAL", "BINBYTES", "SHORT_BINBYTES"),
}
_CONTAINERS = {"EMPTY_DICT", "EMPTY_LIST"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"BINGET", "LONG_BINGET"}
_MOST_OBJECTS = 16  # per byte, in keys of dicts, which are hashed, and in arguments of calls
_MARK: Any = None
_PICKLES = 5  # that begin a file of torch before 1.6: two numbers, the system, the object, its keys


def load_plain(source: Path | io.BytesIO, name: str) -> Any:
    """What a file has, mapped rather than read where the file's kind allows it.

    Args:
        source: the file, or its bytes.
        name: what errors call it.

    Raises:
        CheckpointError: it cannot be read, is damaged, or asks for more than it has.
        pickle.UnpicklingError: it names something that is no plain data.
    """
    try:
        if isinstance(source, io.BytesIO):
            _check(source, source.getbuffer().nbytes)
            return torch.load(source, map_location="cpu", weights_only=True)
        if not source.is_file() and source.exists():  # opening a pipe would wait for a writer
            raise CheckpointError(f"{name} is not a regular file")
        with source.open("rb") as stream:
            _check(stream, os.fstat(stream.fileno()).st_size)
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            return torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    except (ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from None


def _check(stream: IO[bytes], nbytes: int) -> None:
    """Raises ValueError or BadZipFile; the stream is at its beginning after it."""
    if not zipfile.is_zipfile(stream):
        stream.seek(0)
        for _ in range(_PICKLES):
            check_pickle(stream, nbytes, with_ids=True)
    else:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("it is compressed, which torch.save() does not do")
            if sum(member.file_size for member in members) > nbytes:
                raise ValueError(f"its members say that they have more than its {nbytes} bytes")
            for member in members:
                if member.filename.endswith("data.pkl"):
                    content = archive.read(member)
                    check_pickle(io.BytesIO(content), len(content), with_ids=True)
    stream.seek(0)


def check_memory(tensor: torch.Tensor, name: str) -> None:
    """Raises CheckpointError unless each element of a tensor has memory of its own."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(f"{name} has a tensor that is {tensor.layout} on {tensor.device}")
    has = tensor.untyped_storage().nbytes()
    if tensor.nbytes > has:
        raise CheckpointError(
            f"{name} has a tensor of shape {tuple(tensor.shape)}, which is {tensor.nbytes} bytes, "
            f"over {has} bytes: elements of it are the same memory; save a copy, tensor.clone()"
        )


class _Container(list[int]):
    """The number of objects in a dict or list, which grows, as its one element."""


def check_pickle(stream: IO[bytes], nbytes: int, with_ids: bool = False) -> None:
    """Follows a pickle's opcodes, from where a stream is to the pickle's end.

    Args:
        stream: has the pickle.
        nbytes: of the whole file, to which time and memory are in proportion.
        with_ids: whether it may name objects that are outside of it, as torch's storages.

    Raises:
        ValueError: it is none, has an opcode that torch does not write, numbers its memo otherwise
            than in order, or has more objects in keys than bytes could write.
    """
    _Follower(nbytes, with_ids).follow(stream)


class _Follower:
    """The stack and memo of an unpickler, with numbers of objects in them."""

    def __init__(self, nbytes: int, with_ids: bool) -> None:
        self._left = 1000 + _MOST_OBJECTS * nbytes
        self._with_ids = with_ids
        self._stack: list[Any] = []
        self._memo: list[Any] = []

    def follow(self, stream: IO[bytes]) -> None:
        try:
            for opcode, arg, at in pickletools.genops(stream):
                try:
                    self._one(opcode.name, arg)
                except (IndexError, TypeError):
                    raise ValueError(f"{opcode.name} at byte {at} has nothing to act on") from None
        except (OverflowError, UnicodeError, AttributeError) as error:
            raise ValueError(str(error)) from None

    def _one(self, name: str, arg: Any) -> None:
        stack = self._stack
        if name in _LEAVES:
            stack.append(1)
        elif name in _GETS:
            stack.append(self._memo[arg])
        elif name in _PUTS:
            if name != "MEMOIZE" and arg != len(self._memo):
                raise ValueError(f"it puts number {arg} into a memo of {len(self._memo)}")
            self._memo.append(stack[-1])
        elif name in _TUPLES:
            count = _TUPLES[name]
            parts = [stack.pop() for _ in range(count)]
            stack.append(1 + sum(map(_size, parts)))
        elif name == "TUPLE":
            stack.append(1 + sum(map(_size, self._to_mark())))
        elif name in _CONTAINERS:
            stack.append(_Container([1]))
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("APPEND", "APPENDS"):
            parts = [stack.pop()] if name == "APPEND" else self._to_mark()
            self._grow(parts)
        elif name in ("SETITEM", "SETITEMS"):
            parts = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else self._to_mark()
            for key in parts[::2]:
                self._spend(key)
            self._grow(parts)
        elif name in ("REDUCE", "NEWOBJ"):
            given, _ = stack.pop(), stack.pop()
            self._spend(given)
            stack.append(1 + _size(given))
        elif name == "STACK_GLOBAL":
            stack.pop(), stack.pop()
            stack.append(1)
        elif name == "BINPERSID" and self._with_ids:
            self._spend(stack.pop())
            stack.append(1)
        elif name == "BUILD":
            stack.pop()
            _size(stack[-1])
        elif name == "STOP":
            _size(stack.pop())
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the opcode {name}, which torch does not write")

    def _to_mark(self) -> list[Any]:
        parts = []
        while (part := self._stack.pop()) is not _MARK:
            parts.append(part)
        return parts[::-1]

    def _spend(self, part: Any) -> None:
        self._left -= _size(part)
        if self._left < 0:
            raise ValueError("its keys have more objects in them than it has bytes for")

    def _grow(self, parts: list[Any]) -> None:
        # Of REDUCE's and NEWOBJ's objects (an OrderedDict's) the number does not matter any more.
        if isinstance(self._stack[-1], _Container):
            self._stack[-1][0] += sum(map(_size, parts))
        else:
            _size(self._stack[-1])


def _size(part: Any) -> int:
    """How many objects are in it, each as often as it is there."""
    return int(part[0]) if isinstance(part, _Container) else int(part)
