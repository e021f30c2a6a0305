"""Names of DeepSpeed for what hetero has not: they raise ValueError when they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _refused(name: str, said: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(f"{name}: hetero has no {said}")

    return refuse


init_inference = _refused(
    "init_inference",
    "inference engine; deepspeed.initialize() without an optimizer, or model.generate() as it is, "
    "compute from offloaded parameters",
)
tp_model_init = _refused("tp_model_init", "tensor parallelism")


class PipelineModule:
    """Pipeline parallelism, which hetero has not."""

    __init__ = _refused("PipelineModule", "pipeline parallelism; give it the whole model")
