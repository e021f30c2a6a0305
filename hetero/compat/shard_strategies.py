"""ColossalAI's names of what a chunk holds."""

from __future__ import annotations


class TensorShardStrategy:
    """ColossalAI's name for `Config(shard_strategy="tensor")`: one chunk per tensor."""

    name = "tensor"


class BucketTensorShardStrategy:
    """ColossalAI's name for `Config(shard_strategy="bucket")`: one chunk per module's tensors."""

    name = "bucket"
