"""deepspeed.runtime: schedules of learning rates, and zero under its other name."""

from hetero.compat.deepspeed import zero
from hetero.compat.deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules", "zero"]
