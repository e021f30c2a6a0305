"""DeepSpeed's names: `from hetero.compat import deepspeed` in the place of `import deepspeed`."""

from hetero.compat.deepspeed import checkpointing, comm, ops, zero
from hetero.compat.deepspeed.arguments import add_config_arguments
from hetero.compat.deepspeed.comm import init_distributed
from hetero.compat.deepspeed.engine import DeepSpeedEngine
from hetero.compat.deepspeed.initialize import initialize

__all__ = [
    "DeepSpeedEngine",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "init_distributed",
    "initialize",
    "ops",
    "zero",
]
