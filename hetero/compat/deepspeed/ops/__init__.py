"""DeepSpeed's optimizers."""

from hetero.compat.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
