"""ColossalAI's names: `hetero.compat.colossalai` in the place of `colossalai`."""

from hetero.compat.colossalai import booster, older_route, zero
from hetero.compat.colossalai.older_route import (
    get_default_parser,
    initialize,
    launch,
    launch_from_torch,
)
from hetero.compat.module_paths import mirrored
from hetero.compat.optimizers import optimizers_of

core = engine = logging = trainer = utils = older_route
mirrored(
    __name__,
    {
        **dict.fromkeys(("core", "engine", "logging", "trainer", "utils"), older_route),
        "booster": booster,
        "booster.plugin": booster,
        "zero": zero,
        **dict.fromkeys(
            (
                *("zero.gemini", "zero.init_ctx", "zero.shard_utils"),
                *("zero.sharded_model", "zero.sharded_optim"),
            ),
            zero,
        ),
    },
)
nn = mirrored(f"{__name__}.nn", {"optimizer": optimizers_of(f"{__name__}.nn.optimizer")})

__all__ = [
    "booster",
    "core",
    "get_default_parser",
    "initialize",
    "launch",
    "launch_from_torch",
    "logging",
    "nn",
    "trainer",
    "utils",
    "zero",
]
