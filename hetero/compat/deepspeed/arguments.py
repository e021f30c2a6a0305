"""DeepSpeed's arguments of a training's command line."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config, which deepspeed.initialize(args=...) reads.

    Args:
        parser: of the training.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration of the training")
    group.add_argument("--deepspeed", action="store_true", help="train as the configuration says")
    group.add_argument("--deepspeed_config", help="the path of a DeepSpeed configuration, JSON")
    return parser
