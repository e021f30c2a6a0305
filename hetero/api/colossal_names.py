"""Names under which ColossalAI's users know ways of sharding."""

from __future__ import annotations


class TensorShardStrategy:
    """Every tensor by itself, evenly over the ranks: one chunk per tensor."""

    name = "tensor"


class BucketTensorShardStrategy:
    """The tensors of one module (of one operator, say a weight and its bias) together."""

    name = "bucket"
