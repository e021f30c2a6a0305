"""Accelerate: loops whose model and optimizer hetero manages from prepare() on."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from bench.peers_tests.peer import Peer


def _managed(module: ModuleType) -> None:
    """Accelerator is hetero's, and prepare() initializes what it is given, in fp32 and in RAM."""
    import torch

    import hetero
    from hetero.compat.optimizers import hybrid_optimizer
    from hetero.integrations.accelerator import Accelerator

    class Managed(Accelerator):
        def prepare(self, *given: Any, **options: Any) -> Any:
            models = [each for each in given if isinstance(each, torch.nn.Module)]
            torchs = [each for each in given if isinstance(each, torch.optim.Optimizer)]
            if len(models) == 1 and torchs:
                optimizers = [hybrid_optimizer(each) for each in torchs]
                if any(each._engine is None for each in optimizers):
                    hetero.initialize(models[0], optimizers, dtype="fp32", placement_policy="cpu")
            return super().prepare(*given, **options)

    module.Accelerator = Managed  # type: ignore[attr-defined]


PEER = Peer(
    "accelerate",
    {},
    ("test_scheduler.py", "test_state_checkpointing.py", "test_optimizer.py", "test_grad_sync.py"),
    overlays={"accelerate": _managed},
    internals=r"has no attribute '_\w+'",
)
