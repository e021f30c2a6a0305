"""What the programs that train 354 M parameters have in common on their command lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.work.gpt import VOCABULARY, Shape

POLICIES = ("nvme", "auto")


def add_counts(parser: argparse.ArgumentParser, *counts: tuple[str, int, str]) -> None:
    """Options that take a whole number: each one's name, default and what it says."""
    for option, default, text in counts:
        parser.add_argument(
            option, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )


def turn(names: Sequence[str], number: int) -> list[str]:
    """The contenders in the order of a round: each is the first in its turn."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """GPT-2's shape, by default gpt2-medium's, where state lies, and --path."""
    for option, default in (
        ("--layers", 24),
        ("--width", 1024),
        ("--heads", 16),
        ("--vocabulary", VOCABULARY),
    ):
        parser.add_argument(
            option, type=int, default=default, metavar="N", help="default: %(default)s"
        )
    parser.add_argument(
        "--policy", choices=POLICIES, default="nvme", help="of hetero (default: %(default)s)"
    )
    parser.add_argument("--path", metavar="DIR", help="on the NVMe disk (default: a new folder)")


def model_shape(arguments: argparse.Namespace, seq_len: int, batch_size: int) -> Shape:
    """Of what add_model_arguments() read. Raises ValueError for what is no shape."""
    for name in ("layers", "width", "heads", "vocabulary"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be 1 or more, got {getattr(arguments, name)}")
    if arguments.width % arguments.heads:
        raise ValueError(f"--width {arguments.width} is no multiple of --heads {arguments.heads}")
    return Shape(arguments.layers, arguments.width, arguments.heads, seq_len, batch_size)
