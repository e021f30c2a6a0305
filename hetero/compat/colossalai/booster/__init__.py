"""colossalai.booster: Booster and its plugin."""

from hetero.compat.colossalai.booster.booster import Booster

__all__ = ["Booster"]
