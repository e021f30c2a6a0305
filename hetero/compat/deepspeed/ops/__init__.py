"""DeepSpeed's optimizers."""

from hetero.compat.deepspeed.ops import adam

__all__ = ["adam"]
