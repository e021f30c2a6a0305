"""ColossalAI's names: `hetero.compat.colossalai` in the place of `colossalai`."""

from hetero.compat import shard_strategies
from hetero.compat.colossalai import booster, older_route, optimizers, zero
from hetero.compat.colossalai.older_route import (
    get_default_parser,
    initialize,
    launch,
    launch_from_torch,
)
from hetero.compat.module_paths import mirrored

core = engine = logging = trainer = utils = older_route
mirrored(
    __name__,
    {
        **dict.fromkeys(("core", "engine", "logging", "trainer", "utils"), older_route),
        "booster": booster,
        "booster.plugin": booster,
        "zero": zero,
        **{
            f"zero.{name}": zero
            for name in ("gemini", "init_ctx", "sharded_model", "sharded_optim")
        },
        "zero.shard_utils": shard_strategies,
    },
)
nn = mirrored(f"{__name__}.nn", {"optimizer": optimizers})

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
