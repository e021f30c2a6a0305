"""hetero: train PyTorch models whose state does not fit in memory, inside strict budgets."""

from hetero.api.access import (
    clip_grad_norm_,
    clip_grad_value_,
    gathered,
    grads,
    masters,
    no_sync,
)
from hetero.api.offload_activations import offload_activations
from hetero.api.optimizer import HybridOptimizer
from hetero.api.optimizers import (
    Adam,
    AdamW,
    CPUAdam,
    HybridAdagrad,
    HybridAdam,
    HybridLion,
    HybridMuon,
    HybridSGD,
)
from hetero.checkpoint.dcp.load import load_dcp
from hetero.checkpoint.dcp.save import save_dcp
from hetero.checkpoint.folder import latest_checkpoint
from hetero.checkpoint.load import Checkpoint, load
from hetero.checkpoint.pretrained.load import load_pretrained
from hetero.checkpoint.pretrained.save import save_pretrained
from hetero.checkpoint.save import Save, save
from hetero.compat.external_params import (
    register_external_parameter,
    unregister_external_parameter,
)
from hetero.compat.shard_strategies import BucketTensorShardStrategy, TensorShardStrategy
from hetero.config import Config
from hetero.cpu_threads import set_threads
from hetero.durable.commits import commit, resume
from hetero.planning.placement import PlacementError
from hetero.reporting.report import Report, report
from hetero.runtime.engine import Engine
from hetero.setup.init_context import ZeroInitContext
from hetero.setup.initialize import initialize
from hetero.tiling.cross_entropy import TiledCrossEntropy, tiled_cross_entropy
from hetero.tiling.embeddings.tile_embeddings import tile_embeddings
from hetero.tiling.embeddings.tiled_embedding import TiledEmbedding
from hetero.tiling.embeddings.tiled_head import TiledHead
from hetero.tiling.heads import tile_heads
from hetero.tiling.tiled_linear import TiledLinear, tile_linears
from hetero.tiling.tiled_sequence import tile_sequence
from offload.errors import (
    BudgetError,
    CheckpointError,
    ClosedError,
    HeteroError,
    NonFiniteError,
    PeerError,
    StaleGraphError,
    StoreError,
    UnmanagedParameterError,
)

__version__ = "0.1.0"

__all__ = [
    "Adam",
    "AdamW",
    "BucketTensorShardStrategy",
    "BudgetError",
    "CPUAdam",
    "Checkpoint",
    "CheckpointError",
    "ClosedError",
    "Config",
    "Engine",
    "HeteroError",
    "HybridAdagrad",
    "HybridAdam",
    "HybridLion",
    "HybridMuon",
    "HybridOptimizer",
    "HybridSGD",
    "NonFiniteError",
    "PeerError",
    "PlacementError",
    "Report",
    "Save",
    "StaleGraphError",
    "StoreError",
    "TensorShardStrategy",
    "TiledCrossEntropy",
    "TiledEmbedding",
    "TiledHead",
    "TiledLinear",
    "UnmanagedParameterError",
    "ZeroInitContext",
    "clip_grad_norm_",
    "clip_grad_value_",
    "commit",
    "gathered",
    "grads",
    "initialize",
    "latest_checkpoint",
    "load",
    "load_dcp",
    "load_pretrained",
    "masters",
    "no_sync",
    "offload_activations",
    "register_external_parameter",
    "report",
    "resume",
    "save",
    "save_dcp",
    "save_pretrained",
    "set_threads",
    "tile_embeddings",
    "tile_heads",
    "tile_linears",
    "tile_sequence",
    "tiled_cross_entropy",
    "unregister_external_parameter",
]
