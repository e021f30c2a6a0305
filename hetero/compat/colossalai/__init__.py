"""ColossalAI's names: `hetero.compat.colossalai` in the place of `colossalai`."""

from hetero.compat.colossalai import booster, core, logging, optimizers, trainer, utils, zero
from hetero.compat.colossalai.initialize import initialize
from hetero.compat.colossalai.launch import get_default_parser, launch, launch_from_torch
from hetero.compat.module_paths import mirrored

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
