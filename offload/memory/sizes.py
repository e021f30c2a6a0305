"""Byte sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

PAGE_BYTES = 4096  # alignment of extents and O_DIRECT transfers

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Bytes in `size`: an int, or text such as "4GiB", "512 MB", "1.5g" (k, m, g, t are binary).

    Raises ValueError for anything else, and for sizes that are not positive.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"a size must be an int or text such as '4GiB', not {size!r}")
    if isinstance(size, int):
        nbytes = size
    else:
        match = _SIZE.fullmatch(size)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"cannot read {size!r} as a size; write bytes or e.g. '4GiB', '512MB'")
        nbytes = int(Fraction(match[1]) * unit)  # exact, whatever the number of digits
    if nbytes <= 0:
        raise ValueError(f"a size must be positive, not {size!r}")
    return nbytes


def format_bytes(nbytes: float) -> str:
    """`nbytes` with a binary unit, e.g. "4.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
