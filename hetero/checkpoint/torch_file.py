"""Reads pickles, and files of torch.save(), that have tensors and plain data, and runs nothing.

Forty lines of a pickle can ask for a tuple that has the same tuple twice, that has another one
twice, and so on: its hash or its text takes years. So pickles are read by Python's own unpickler in
Python, with the opcodes that torch writes: names come from a table, nothing else is called, and
what is used again counts as often as it is there. torch.load(weights_only=True) runs nothing of a
file either, but takes what it asks for, also an archive that was compressed to a thousandth, or a
tensor of 2^36 elements that all are the same four bytes. So files for it are read so first.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import torch

from hetero.checkpoint.schema import shortened
from offload.errors import CheckpointError

_MOST_SHARED = 16  # objects per byte of a pickle, in what is used again
_Base: Any = pickle._Unpickler
_OPCODES = (
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.BINUNICODE8, pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.EMPTY_TUPLE),
    *(pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
    *(pickle.MARK, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.APPEND),
    *(pickle.APPENDS, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),
    *(pickle.PROTO, pickle.FRAME, pickle.STOP),
)


class StandIn(dict[str, Any]):
    """The attributes that a pickle gives an object, by name; each is a key of its own."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def stand_in(*_: Any) -> StandIn:
    """Makes a StandIn, whatever it is made of."""
    return StandIn()


class _Unpickler(_Base):  # type: ignore[misc]
    """Knows few opcodes, and of names those in a table."""

    def __init__(self, content: bytes, names: Mapping[str, Any] | None) -> None:
        super().__init__(io.BytesIO(content))
        self._names = names
        self._left = 1000 + _MOST_SHARED * len(content)

    def persistent_load(self, pid: Any) -> Any:
        """See pickle.Unpickler: what torch keeps outside of pickles."""
        if self._names is not None:
            raise ValueError("it refers to something outside of it")
        return StandIn()

    def find_class(self, module: str, name: str) -> Any:
        """See pickle.Unpickler: what stands for a name."""
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

    def _check_items(self, target: Any, keys: Sequence[Any]) -> None:
        """Raises ValueError unless `target` is a dict and the hashes of `keys` take no time."""
        if not isinstance(target, dict):
            raise ValueError(f"it sets items of {shortened(target)}")
        for key in keys:
            for each in key if type(key) is tuple else (key,):
                if not isinstance(each, (str, int, float, bytes, type(None), StandIn)):
                    raise ValueError(f"it has the key {shortened(key)}")

    def _set_item(self) -> None:
        self._check_items(self.stack[-3], self.stack[-2:-1])
        _Base.load_setitem(self)

    def _set_items(self) -> None:
        self._check_items(self.metastack[-1][-1], self.stack[::2])
        _Base.load_setitems(self)

    def _make(self) -> None:
        given, function = self.stack.pop(), self.stack.pop()
        self.stack.append(StandIn() if self._names is None else function(*given))

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], StandIn):
            self.stack[-1].update(state if isinstance(state, dict) else {"values": state})
        elif type(self.stack[-1]) is not dict:  # (an OrderedDict's attributes are left out)
            raise ValueError(f"it gives attributes to {shortened(self.stack[-1])}")

    def _get(self, load: Callable[[Any], None]) -> None:
        """Counts the objects in what is used again. Raises ValueError if there are too many."""
        load(self)
        waiting = [self.stack[-1]]
        while waiting:
            self._left -= 1
            if self._left < 0:
                raise ValueError("it has more objects in it than it has bytes for")
            each = waiting.pop()
            if isinstance(each, (list, tuple)):
                waiting += each
            elif isinstance(each, dict):
                waiting += each.values()

    dispatch = {  # noqa: RUF012 (as the base class has it)
        **{opcode[0]: _Base.dispatch[opcode[0]] for opcode in _OPCODES},
        pickle.REDUCE[0]: _make,
        pickle.NEWOBJ[0]: _make,
        pickle.BINGET[0]: lambda self: self._get(_Base.load_binget),
        pickle.LONG_BINGET[0]: lambda self: self._get(_Base.load_long_binget),
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.BUILD[0]: _build,
    }


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
        is_file = isinstance(source, Path)
        if isinstance(source, Path) and source.exists() and not source.is_file():
            raise CheckpointError(f"{where} is not a regular file")  # (a pipe has no end)
        with source.open("rb") if isinstance(source, Path) else nullcontext(source) as stream:
            _check(stream, where)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_file)
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


def _check(stream: IO[bytes], where: str) -> None:
    """Raises CheckpointError, or an error of zipfile's; the stream is at its beginning after it."""
    nbytes = stream.seek(0, os.SEEK_END)
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
