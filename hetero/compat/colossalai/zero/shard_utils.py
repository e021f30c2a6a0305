"""colossalai.zero.shard_utils: what a chunk holds."""

from hetero.compat.shard_strategies import BucketTensorShardStrategy, TensorShardStrategy

__all__ = ["BucketTensorShardStrategy", "TensorShardStrategy"]
