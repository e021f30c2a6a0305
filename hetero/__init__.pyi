"""The public names, and the modules that they are in: hetero/__init__.py reads this, and type
checkers do."""

from hetero.api.access import (
    clip_grad_norm_ as clip_grad_norm_,
    clip_grad_value_ as clip_grad_value_,
    gathered as gathered,
    grads as grads,
    masters as masters,
    no_sync as no_sync,
    offload_activations as offload_activations,
)
from hetero.api.optimizer import HybridOptimizer as HybridOptimizer
from hetero.api.optimizers import (
    Adam as Adam,
    AdamW as AdamW,
    CPUAdam as CPUAdam,
    HybridAdagrad as HybridAdagrad,
    HybridAdam as HybridAdam,
    HybridLion as HybridLion,
    HybridMuon as HybridMuon,
    HybridSGD as HybridSGD,
)
from hetero.checkpoint.dcp.dcp_checkpoint import load_dcp as load_dcp
from hetero.checkpoint.dcp.write import save_dcp as save_dcp
from hetero.checkpoint.folder import latest_checkpoint as latest_checkpoint
from hetero.checkpoint.load import Checkpoint as Checkpoint, load as load
from hetero.checkpoint.pretrained.safetensors_checkpoint import load_pretrained as load_pretrained
from hetero.checkpoint.pretrained.weight_files import save_pretrained as save_pretrained
from hetero.checkpoint.save import Save as Save, save as save
from hetero.compat.shared_names import (
    BucketTensorShardStrategy as BucketTensorShardStrategy,
    TensorShardStrategy as TensorShardStrategy,
    register_external_parameter as register_external_parameter,
    unregister_external_parameter as unregister_external_parameter,
)
from hetero.config import Config as Config
from hetero.cpu_threads import set_threads as set_threads
from hetero.durable.commits import commit as commit, resume as resume
from hetero.planning.placement import PlacementError as PlacementError
from hetero.reporting.report import Report as Report, report as report
from hetero.runtime.engine import Engine as Engine
from hetero.setup.init_context import ZeroInitContext as ZeroInitContext
from hetero.setup.initialize import initialize as initialize
from hetero.tiling.cross_entropy import (
    tiled_cross_entropy as tiled_cross_entropy,
)
from hetero.tiling.heads import tile_heads as tile_heads
from hetero.tiling.tiled_embeddings import (
    TiledEmbedding as TiledEmbedding,
    TiledHead as TiledHead,
    tile_embeddings as tile_embeddings,
)
from hetero.tiling.tiled_linear import TiledLinear as TiledLinear, tile_linears as tile_linears
from hetero.tiling.tiled_sequence import tile_sequence as tile_sequence
from offload.errors import (
    BudgetError as BudgetError,
    CheckpointError as CheckpointError,
    ClosedError as ClosedError,
    HeteroError as HeteroError,
    NonFiniteError as NonFiniteError,
    PeerError as PeerError,
    StaleGraphError as StaleGraphError,
    StoreError as StoreError,
    UnmanagedParameterError as UnmanagedParameterError,
)

__version__: str
