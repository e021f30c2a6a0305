"""Names of DeepSpeed for what hetero has not: they say so when they are called."""

from __future__ import annotations

from typing import Any


class PipelineModule:
    """Pipeline parallelism, which hetero has not.

    Raises:
        ValueError: always.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "PipelineModule: hetero has no pipeline parallelism; give it the whole model"
        )


def init_inference(*_: Any, **__: Any) -> Any:
    """DeepSpeed's inference engine, which hetero has not. Raises ValueError."""
    raise ValueError(
        "init_inference: hetero has no inference engine; deepspeed.initialize() without an "
        "optimizer, or model.generate() as it is, compute from offloaded parameters"
    )


def tp_model_init(*_: Any, **__: Any) -> Any:
    """Tensor parallelism, which hetero has not. Raises ValueError."""
    raise ValueError("tp_model_init: hetero has no tensor parallelism")
