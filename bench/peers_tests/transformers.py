"""Transformers: its Trainer, with the model and the optimizer managed by hetero."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from bench.peers_tests.peer import Peer


def _managed(module: ModuleType) -> None:
    """Trainer is hetero's, in fp32 and in RAM."""
    from hetero.compat.torch_optimizers import hybrid_optimizer
    from hetero.integrations.trainer import HeteroTrainerMixin

    class Managed(HeteroTrainerMixin, module.Trainer):  # type: ignore[name-defined, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            options = {"dtype": "fp32", "placement_policy": "cpu"}
            optimizer, _ = kwargs.get("optimizers", (None, None))
            if optimizer is not None:
                hybrid_optimizer(optimizer)
            super().__init__(*args, hetero_config=options, **kwargs)

    module.Trainer = Managed  # type: ignore[attr-defined]


PEER = Peer(
    "transformers",
    {},
    tuple(
        f"tests/trainer/test_trainer{name}.py"
        for name in ("", "_optimizers", "_checkpointing", "_callback", "_evaluation")
    ),
    folder=".",
    overlays={"transformers.trainer": _managed},
)
