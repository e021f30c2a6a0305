"""Whether a pickle of DCP's can be loaded in time and memory that are in proportion to its size.

Nine bytes of a pickle can ask for a memo of 2^31 entries, and forty lines for a tuple that has the
same tuple twice, that has another one twice, and so on: its hash or its text takes years. So the
opcodes are followed before anything is loaded, with the number of objects in the place of each
object.
"""

from __future__ import annotations

import pickletools
from typing import Any

# What DCP's own pickles have, of any protocol from 2 on, and nothing that makes other objects.
_LEAVES = {
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "GLOBAL", "BINBYTES", "SHORT_BINBYTES"),
}
_CONTAINERS = {"EMPTY_DICT", "EMPTY_LIST"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"BINGET", "LONG_BINGET"}
_MOST_OF_KEY = 100  # objects in a dict's key, which is hashed, or in what a class is called with
_MARK: Any = None


class _Container(list[int]):
    """The number of objects in a dict or list, which grows, as its one element."""


def check_pickle(content: bytes) -> None:
    """Follows a pickle's opcodes.

    Raises:
        ValueError: it is none, has an opcode that DCP does not write, numbers its memo otherwise
            than in order, or has a key of too many objects.
    """
    _Follower().follow(content)


class _Follower:
    """The stack and memo of an unpickler, with numbers of objects in them."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: list[Any] = []

    def follow(self, content: bytes) -> None:
        try:
            for opcode, arg, at in pickletools.genops(content):
                try:
                    self._one(opcode.name, arg)
                except (IndexError, TypeError):
                    raise ValueError(f"{opcode.name} at byte {at} has nothing to act on") from None
                if opcode.name == "STOP" and at + 1 != len(content):
                    raise ValueError(f"{len(content) - at - 1} bytes follow its end")
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
                _check_small(key, "a key")
            self._grow(parts)
        elif name in ("REDUCE", "NEWOBJ"):
            given, _ = stack.pop(), stack.pop()
            _check_small(given, "arguments")
            stack.append(1 + _size(given))
        elif name == "STACK_GLOBAL":
            stack.pop(), stack.pop()
            stack.append(1)
        elif name == "BUILD":
            stack.pop()
            _size(stack[-1])
        elif name == "STOP":
            _size(stack.pop())
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the opcode {name}, which DCP does not write")

    def _to_mark(self) -> list[Any]:
        parts = []
        while (part := self._stack.pop()) is not _MARK:
            parts.append(part)
        return parts[::-1]

    def _grow(self, parts: list[Any]) -> None:
        # Of REDUCE's and NEWOBJ's objects (an OrderedDict's) the number does not matter any more.
        if isinstance(self._stack[-1], _Container):
            self._stack[-1][0] += sum(map(_size, parts))
        else:
            _size(self._stack[-1])


def _size(part: Any) -> int:
    """How many objects are in it, each as often as it is there."""
    return int(part[0]) if isinstance(part, _Container) else int(part)


def _check_small(part: Any, what: str) -> None:
    if _size(part) > _MOST_OF_KEY:
        raise ValueError(f"{what} has {_size(part)} objects in it, and may have {_MOST_OF_KEY}")
