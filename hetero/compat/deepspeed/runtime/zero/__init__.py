"""deepspeed.runtime.zero: deepspeed.zero under its other name."""

from hetero.compat.deepspeed.runtime.zero import offload_config
from hetero.compat.deepspeed.zero import (
    GatheredParameters,
    Init,
    TiledLinear,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "offload_config",
    "register_external_parameter",
    "unregister_external_parameter",
]
