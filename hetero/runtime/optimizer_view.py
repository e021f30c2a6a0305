"""What the engine sees of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.chunk_groups.update_tasks import HyperOf

# The optimizer's param groups as they are at the time.
ParamGroups = Callable[[], Sequence[dict[str, Any]]]


@dataclass(frozen=True)
class OptimizerView:
    """The optimizer's param groups, and what their options mean; it does not keep it alive."""

    param_groups: ParamGroups
    hyper_of: HyperOf
