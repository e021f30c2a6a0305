"""The numbers among the options of param groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch


def number(value: object) -> float | None:
    """`value` as a float if it is a number, or a tensor of one element that is; else None.

    A bool is none, and what is beyond the range of float is infinite.
    """
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
        return float(value) if is_number else None
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def numbers_of(option: object) -> list[float]:
    """An option's numbers: one, as many as its tuple has, or NaN for what is none."""
    values: Sequence[object] = option if isinstance(option, (tuple, list)) else [option]
    found = (float(v) if isinstance(v, bool) else number(v) for v in values)
    return [math.nan if v is None else v for v in found]
