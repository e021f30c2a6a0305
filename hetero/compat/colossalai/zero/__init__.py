"""colossalai.zero: sharded and placed models and their optimizers."""

from hetero.compat.colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
from hetero.compat.colossalai.zero.init_ctx import ZeroInitContext
from hetero.compat.colossalai.zero.shard_utils import (
    BucketTensorShardStrategy,
    TensorShardStrategy,
)
from hetero.compat.colossalai.zero.sharded_model import ShardedModelV2
from hetero.compat.colossalai.zero.sharded_optim import ShardedOptimizerV2

__all__ = [
    "BucketTensorShardStrategy",
    "GeminiDDP",
    "GeminiOptimizer",
    "ShardedModelV2",
    "ShardedOptimizerV2",
    "TensorShardStrategy",
    "ZeroInitContext",
]
