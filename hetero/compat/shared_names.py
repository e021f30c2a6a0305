"""Names of DeepSpeed and ColossalAI that `hetero` itself has, too."""

from __future__ import annotations

import torch


class TensorShardStrategy:
    """ColossalAI's name for `debug={'shard_strategy': 'tensor'}`: one chunk per tensor."""

    name = "tensor"


class BucketTensorShardStrategy:
    """ColossalAI's name for `debug={'shard_strategy': 'bucket'}`: one per module."""

    name = "bucket"


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Does nothing: hetero sees uses of a parameter outside its owner as they happen.

    DeepSpeed needs this call for each `parameter` that a `module` uses and does not own.

    Raises:
        ValueError: if `parameter` is not a torch.nn.Parameter, as with DeepSpeed.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise ValueError(f"parameter must be a torch.nn.Parameter, not {type(parameter).__name__}")


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Does nothing; the counterpart of register_external_parameter(), and raises as that does."""
    register_external_parameter(module, parameter)
