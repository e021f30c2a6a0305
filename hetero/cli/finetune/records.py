"""Data files, record by record, with the place that errors name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".json", ".jsonl", ".txt")


@dataclass(frozen=True)
class Record:
    """One entry: its content (of a text file, the text), and where it is."""

    content: Any
    place: str  # "data.jsonl, line 3"


def read_records(path: str | Path) -> list[Record]:
    """The records of a file, or of the files of a folder in sorted order.

    A .json file is a list of records; a .jsonl file has one on each line, empty lines left out; a
    .txt file is one text.

    Raises:
        ValueError: a file is missing, unreadable, empty or no JSON; it says where.
    """
    root = Path(path)
    if not root.exists():
        raise ValueError(f"--data {root}: no such file or folder")
    files = [root]
    if root.is_dir():
        files = sorted(file for file in root.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise ValueError(f"--data {root} has no file that ends in {', '.join(SUFFIXES)}")
    elif root.suffix not in SUFFIXES:
        raise ValueError(
            f"--data {root} ends in {root.suffix or 'nothing'}; rename it to what it is: .json (a "
            f"list of records), .jsonl (one record on each line) or .txt (a text)"
        )
    found = [record for file in files for record in _records_of(file)]
    if not found:
        raise ValueError(f"--data {root} has no records")
    return found


def _records_of(file: Path) -> Iterator[Record]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{file}, line {line}: byte {error.object[error.start]:#04x} is no UTF-8; save the "
            f"file as UTF-8"
        ) from error
    if file.suffix == ".txt":
        if text.strip():
            yield Record(text, str(file))
    elif file.suffix == ".jsonl":
        # (Not splitlines(): U+2028 and others may stand inside a JSON string.)
        for number, entry in enumerate(text.split("\n"), start=1):
            if entry.strip():
                place = f"{file}, line {number}"
                yield Record(_parsed(entry, place, None), place)
    else:
        content = _parsed(text, str(file), file)
        if not isinstance(content, list):
            raise ValueError(
                f"{file} is one {_kind(content)}, and a .json file must be a list of records; put "
                f"it into [ ], or name the file .jsonl if each line is a record"
            )
        for number, each in enumerate(content, start=1):
            yield Record(each, f"{file}, record {number}")


def _parsed(text: str, place: str, whole_file: Path | None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}"
        if whole_file is not None:
            where = f"line {error.lineno}, {where}"
        raise ValueError(f"{place}, {where}: no JSON: {error.msg}; correct it there") from error


def _kind(content: Any) -> str:
    kinds = {dict: "object", str: "string", type(None): "null", bool: "boolean"}
    return kinds.get(type(content), "number")
