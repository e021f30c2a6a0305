"""Reads pickles, and files of torch.save(), that have tensors and plain data, and runs nothing.

Nine bytes of a pickle can ask for a memo of 2^31 entries, and forty lines for a tuple that has the
same tuple twice, that has another one twice, and so on: its hash or its text takes years. So
opcodes are followed here, in Python: names come from a table, nothing else is called, and what is
used again counts as often as it is there. torch.load(weights_only=True) runs nothing of a file
either, but takes what it asks for, also an archive that was compressed to a thousandth, or a tensor
of 2^36 elements that all are the same four bytes. So files for it are followed first.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from hetero.checkpoint.schema import shortened
from offload.errors import CheckpointError

_MOST_SHARED = 16  # objects per byte of a pickle, in what is used again
_MARK: Any = object()
_PLAIN_OPCODES = {
    *("NONE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"),
    *("SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
}
_CONSTANTS: dict[str, Any] = {"NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class StandIn(dict[str, Any]):
    """The attributes that a pickle gives an object, by name; each is a key of its own."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def _key(value: Any) -> Any:
    """A key of a dict, whose hash takes no time. Raises ValueError for others."""
    for each in value if type(value) is tuple else (value,):
        if not isinstance(each, (str, int, float, bytes, type(None), StandIn)):
            raise ValueError(f"it has the key {shortened(value)}")
    return value


class _Unpickler:
    """The stack and the memo of a pickle."""

    def __init__(self, content: bytes, names: Mapping[str, Any] | None) -> None:
        self._content, self._names = content, names
        self._left = 1000 + _MOST_SHARED * len(content)
        self._stack: list[Any] = []
        self._memo: list[Any] = []

    def load(self) -> Any:
        for opcode, arg, _ in pickletools.genops(self._content):
            self._one(opcode.name, arg)
        return self._pop()

    def _one(self, name: str, arg: Any) -> None:
        push = self._stack.append
        if name in _PLAIN_OPCODES:
            push(arg)
        elif name in _CONSTANTS:
            push(_CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            push({} if name == "EMPTY_DICT" else [])
        elif name in ("BINGET", "LONG_BINGET"):
            self._count(self._memo[arg])
            push(self._memo[arg])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            if name != "MEMOIZE" and arg != len(self._memo):
                raise ValueError(f"it puts number {arg} into a memo of {len(self._memo)}")
            self._memo.append(self._stack[-1])
        elif name == "MARK":
            push(_MARK)
        elif name == "TUPLE":
            push(tuple(self._to_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            push(tuple([self._pop() for _ in range(int(name[-1]))][::-1]))
        elif name in ("APPEND", "APPENDS"):
            parts = [self._pop()] if name == "APPEND" else self._to_mark()
            list.extend(self._stack[-1], parts)
        elif name in ("SETITEM", "SETITEMS"):
            pair = name == "SETITEM"
            parts = [self._pop(), self._pop()][::-1] if pair else self._to_mark()
            pairs = zip(parts[::2], parts[1::2], strict=True)
            dict.update(self._stack[-1], {_key(key): value for key, value in pairs})
        elif name == "GLOBAL":
            push(self._find(*arg.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            of_module = self._pop()
            push(self._find(self._pop(), of_module))
        elif name in ("REDUCE", "NEWOBJ"):
            given, function = self._pop(), self._pop()
            push(StandIn() if self._names is None else function(*given))
        elif name == "BUILD":
            state = self._pop()
            if isinstance(self._stack[-1], StandIn):
                self._stack[-1].update(state if isinstance(state, dict) else {"values": state})
            elif type(self._stack[-1]) is not dict:  # (an OrderedDict's attributes are left out)
                raise ValueError(f"it gives attributes to {shortened(self._stack[-1])}")
        elif name == "BINPERSID" and self._names is None:
            self._pop()
            push(StandIn())
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"it has the opcode {name}, which torch does not write")

    def _pop(self) -> Any:
        found = self._stack.pop()
        if found is _MARK:
            raise ValueError("it lacks an object")
        return found

    def _to_mark(self) -> list[Any]:
        parts = []
        while (part := self._stack.pop()) is not _MARK:
            parts.append(part)
        return parts[::-1]

    def _count(self, value: Any) -> None:
        """Counts the objects in what is used again. Raises ValueError if there are too many."""
        waiting = [value]
        while waiting:
            self._left -= 1
            if self._left < 0:
                raise ValueError("it has more objects in it than it has bytes for")
            each = waiting.pop()
            if isinstance(each, (list, tuple)):
                waiting += each
            elif isinstance(each, dict):
                waiting += each.values()

    def _find(self, module: Any, name: Any) -> Any:
        if self._names is None:
            return StandIn()
        found = self._names.get(f"{module}.{name}")
        if found is None:
            raise CheckpointError(
                f"names {shortened(module)[1:-1]}.{shortened(name)[1:-1]}, which DCP does not "
                f"write and which could run anything, so nothing of it was read; read such a file "
                f"only by torch, and only if you trust who wrote it"
            )
        return found


def unpickle(content: bytes, where: str, names: Mapping[str, Any] | None = None) -> Any:
    """What a pickle has.

    Args:
        content: the pickle; what follows it is passed over.
        where: what errors call it.
        names: by "module.name", what stands for that. None: a StandIn for all that names make, and
            for what torch keeps outside of pickles.

    Raises:
        CheckpointError: it names something else, asks for more than it has, or is damaged.
    """
    try:
        return _Unpickler(content, names).load()
    except CheckpointError as error:
        raise CheckpointError(f"{where} {error}") from None
    except Exception as error:  # a pickle that was cut or made up raises almost anything
        raise CheckpointError(
            f"{where} is damaged: {type(error).__name__}: {str(error)[:300] or 'it is no pickle'}"
        ) from None


def load_plain(source: Path | io.BytesIO, where: str) -> Any:
    """What torch.save() was given, mapped rather than read if it is a file.

    Args:
        source: the file, or its bytes.
        where: what errors call it.

    Raises:
        CheckpointError: it cannot be read, is damaged, is of a torch before 1.6, asks for more than
            it has, or names something that is no plain data.
    """
    try:
        if isinstance(source, io.BytesIO):
            _check(source, source.getbuffer().nbytes, where)
            return torch.load(source, map_location="cpu", weights_only=True)
        if not source.is_file() and source.exists():  # opening a pipe would wait for a writer
            raise CheckpointError(f"{where} is not a regular file")
        with source.open("rb") as stream:
            _check(stream, os.fstat(stream.fileno()).st_size, where)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
    except pickle.UnpicklingError as error:
        names = re.findall(r"GLOBAL ([\w.]+)", str(error))
        what = f"names {names[0]}" if names else "is damaged, or has more than plain data"
        raise CheckpointError(
            f"{where} {what}, which is not loaded: it could run anything"
        ) from None
    except Exception as error:  # (of whatever class torch's reading of a damaged file raises)
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {text}") from None


def _check(stream: IO[bytes], nbytes: int, where: str) -> None:
    """Raises CheckpointError, or an error of zipfile's; the stream is at its beginning after it."""
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("it is compressed, which torch.save() does not do")
        if sum(member.file_size for member in members) > nbytes:
            raise ValueError(f"its members say that they have more than its {nbytes} bytes")
        for member in members:
            if member.filename.endswith("data.pkl"):
                unpickle(archive.read(member), where)
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
