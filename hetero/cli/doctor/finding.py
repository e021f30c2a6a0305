"""What a check says of its facts."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Level(enum.Enum):
    """How much a finding matters.

    OK: as it should be. NOTE: hetero works, but slower, with less memory, or without something.
    PROBLEM: training as asked for would fail, or would not do what it is for.
    """

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of what was looked at.
        level: how much it matters.
        fact: what is so, with its numbers.
        fix: what to do about it, a command line where there is one; "" if there is nothing to do.
    """

    name: str
    level: Level
    fact: str
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"name": self.name, "level": self.level.value, "fact": self.fact, "fix": self.fix}


def ok(name: str, fact: str) -> Finding:
    """A finding that asks for nothing."""
    return Finding(name, Level.OK, fact)


def note(name: str, fact: str, fix: str) -> Finding:
    """A finding that hetero works with."""
    return Finding(name, Level.NOTE, fact, fix)


def problem(name: str, fact: str, fix: str) -> Finding:
    """A finding that training would fail by."""
    return Finding(name, Level.PROBLEM, fact, fix)
