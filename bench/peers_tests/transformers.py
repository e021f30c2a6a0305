"""Transformers: its Trainer, with the model and the optimizer managed by hetero."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from bench.peers_tests.peer import Peer


def _managed(module: ModuleType) -> None:
    """Trainer is hetero's, in fp32 and in RAM; logs, which tests compare, have no figures of it."""
    import transformers

    from hetero.compat.optimizers import hybrid_optimizer
    from hetero.integrations.trainer import HeteroTrainerMixin

    plain: Any = module.Trainer

    class Managed(HeteroTrainerMixin, plain):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            options = {"dtype": "fp32", "placement_policy": "cpu"}
            optimizer, _ = kwargs.get("optimizers", (None, None))
            if optimizer is not None:
                hybrid_optimizer(optimizer)
            super().__init__(*args, hetero_config=options, **kwargs)

        def log(self, *args: Any, **kwargs: Any) -> None:
            plain.log(self, *args, **kwargs)

    # (The package keeps the name's value since hetero's own module has asked for it.)
    module.Trainer = transformers.Trainer = Managed  # type: ignore[attr-defined, misc]


def _checkpoints(module: ModuleType) -> None:
    """The tests look for the files of hetero's checkpoints."""

    def check(
        case: Any,
        output_dir: str,
        freq: int,
        total: int,
        is_pretrained: bool = True,
        use_scaler: bool = False,
    ) -> None:
        files = {"model.safetensors", "training_args.bin", "trainer_state.json", "hetero"}
        files |= {"config.json"} if is_pretrained else set()
        for step in range(freq, total, freq):
            assert files <= set(os.listdir(f"{output_dir}/checkpoint-{step}"))

    module.TrainerIntegrationCommon.check_saved_checkpoints = check


PEER = Peer(
    "transformers",
    {},
    tuple(
        f"tests/trainer/test_trainer{name}.py"
        for name in ("", "_optimizers", "_checkpointing", "_callback", "_evaluation")
    ),
    folder=".",
    overlays={
        "transformers.trainer": _managed,
        "tests.trainer.trainer_test_utils": _checkpoints,
    },
)
