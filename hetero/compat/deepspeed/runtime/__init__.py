"""deepspeed.runtime: schedules of learning rates, and zero under its other name."""

from hetero.compat.deepspeed.runtime import lr_schedules, zero

__all__ = ["lr_schedules", "zero"]
