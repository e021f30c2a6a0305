"""DeepSpeed's names: `from hetero.compat import deepspeed` in the place of `import deepspeed`."""

from hetero.compat.deepspeed import accelerator as accelerator
from hetero.compat.deepspeed import checkpointing as checkpointing
from hetero.compat.deepspeed import checkpoints, lr_schedules, options
from hetero.compat.deepspeed import comm as comm
from hetero.compat.deepspeed import utils as utils
from hetero.compat.deepspeed import zero as zero
from hetero.compat.deepspeed.accelerator import get_accelerator as get_accelerator
from hetero.compat.deepspeed.comm import init_distributed as init_distributed
from hetero.compat.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
from hetero.compat.deepspeed.initialize import PipelineModule as PipelineModule
from hetero.compat.deepspeed.initialize import add_config_arguments as add_config_arguments
from hetero.compat.deepspeed.initialize import init_inference as init_inference
from hetero.compat.deepspeed.initialize import initialize as initialize
from hetero.compat.deepspeed.initialize import tp_model_init as tp_model_init
from hetero.compat.deepspeed.options import DeepSpeedConfig as DeepSpeedConfig
from hetero.compat.deepspeed.utils import OnDevice as OnDevice
from hetero.compat.deepspeed.utils import logger as logger
from hetero.compat.module_paths import mirrored
from hetero.compat.optimizers import optimizers_of
from hetero.ranks.process_groups import is_distributed

__version__, is_initialized = options.RELEASE, is_distributed
mirrored(__name__, {"utils": utils, "utils.zero_to_fp32": checkpoints})
optimizers = optimizers_of("deepspeed.ops.adam")
ops = mirrored(f"{__name__}.ops", dict.fromkeys(("adagrad", "adam", "lion"), optimizers))
runtime = mirrored(
    f"{__name__}.runtime",
    {"lr_schedules": lr_schedules, "zero": zero, "zero.offload_config": options},
)
