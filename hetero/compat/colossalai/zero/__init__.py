"""colossalai.zero: sharded and placed models and their optimizers."""

from hetero.compat import shard_strategies
from hetero.compat.colossalai.zero import sharded
from hetero.compat.colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
from hetero.compat.colossalai.zero.init_ctx import ZeroInitContext
from hetero.compat.colossalai.zero.sharded import ShardedModelV2, ShardedOptimizerV2
from hetero.compat.module_paths import mirrored
from hetero.compat.shard_strategies import BucketTensorShardStrategy, TensorShardStrategy

mirrored(
    __name__,
    {"shard_utils": shard_strategies, "sharded_model": sharded, "sharded_optim": sharded},
)

__all__ = [
    "BucketTensorShardStrategy",
    "GeminiDDP",
    "GeminiOptimizer",
    "ShardedModelV2",
    "ShardedOptimizerV2",
    "TensorShardStrategy",
    "ZeroInitContext",
]
