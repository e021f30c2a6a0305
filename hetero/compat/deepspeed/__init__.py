"""DeepSpeed's names: `from hetero.compat import deepspeed` in the place of `import deepspeed`."""

from hetero.compat.deepspeed import (
    accelerator,
    checkpointing,
    checkpoints,
    comm,
    lr_schedules,
    options,
    utils,
    zero,
)
from hetero.compat.deepspeed.accelerator import get_accelerator
from hetero.compat.deepspeed.comm import init_distributed
from hetero.compat.deepspeed.engine import DeepSpeedEngine
from hetero.compat.deepspeed.initialize import (
    PipelineModule,
    add_config_arguments,
    init_inference,
    initialize,
    tp_model_init,
)
from hetero.compat.deepspeed.options import RELEASE as __version__
from hetero.compat.deepspeed.options import DeepSpeedConfig
from hetero.compat.deepspeed.utils import OnDevice, logger
from hetero.compat.module_paths import mirrored
from hetero.compat.optimizers import optimizers_of
from hetero.ranks.process_groups import is_distributed as is_initialized

mirrored(__name__, {"utils": utils, "utils.zero_to_fp32": checkpoints})
optimizers = optimizers_of("deepspeed.ops.adam")
ops = mirrored(f"{__name__}.ops", dict.fromkeys(("adagrad", "adam", "lion"), optimizers))
runtime = mirrored(
    f"{__name__}.runtime",
    {"lr_schedules": lr_schedules, "zero": zero, "zero.offload_config": options},
)

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "OnDevice",
    "PipelineModule",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "is_initialized",
    "logger",
    "ops",
    "runtime",
    "tp_model_init",
    "utils",
    "zero",
]
