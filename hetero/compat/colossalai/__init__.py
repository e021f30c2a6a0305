"""ColossalAI's names: `hetero.compat.colossalai` in the place of `colossalai`."""

from hetero.compat.colossalai import booster as booster
from hetero.compat.colossalai import older_route
from hetero.compat.colossalai import zero as zero
from hetero.compat.colossalai.older_route import initialize as initialize
from hetero.compat.colossalai.older_route import launch as launch
from hetero.compat.colossalai.older_route import launch_from_torch as launch_from_torch
from hetero.compat.module_paths import mirrored
from hetero.compat.optimizers import optimizers_of

_OF_ZERO = "gemini init_ctx shard_utils sharded_model sharded_optim"
mirrored(
    __name__,
    {
        **dict.fromkeys(("core", "engine", "logging", "utils"), older_route),
        "booster": booster,
        "booster.plugin": booster,
        "zero": zero,
        **{f"zero.{name}": zero for name in _OF_ZERO.split()},
    },
)
nn = mirrored(f"{__name__}.nn", {"optimizer": optimizers_of("colossalai.nn.optimizer")})
