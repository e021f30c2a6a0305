"""ColossalAI's names: `hetero.compat.colossalai` in the place of `colossalai`."""

from hetero.compat.colossalai import booster, optimizers, trainer, zero
from hetero.compat.colossalai import by_configuration as core
from hetero.compat.colossalai import utilities as logging
from hetero.compat.colossalai import utilities as utils
from hetero.compat.colossalai.by_configuration import (
    get_default_parser,
    initialize,
    launch,
    launch_from_torch,
)
from hetero.compat.module_paths import mirrored

nn = mirrored(f"{__name__}.nn", {"optimizer": optimizers})
mirrored(__name__, {"core": core, "engine": core, "logging": logging, "utils": utils})
mirrored(__name__, {"booster": booster, "booster.plugin": booster})

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
