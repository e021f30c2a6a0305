"""colossalai.nn: its optimizers."""

from hetero.compat.colossalai.nn import optimizer

__all__ = ["optimizer"]
