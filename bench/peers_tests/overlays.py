"""Changes of modules of other projects, so that their tests use hetero, on a machine without GPU.

Each gets a module that was just imported, in every process of a test run. torch and hetero are
imported inside of them: earlier, and the overlays of torch's own modules would come too late.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


class NotThere(Exception):
    """A test used a name of the project that hetero has not."""


# DeepSpeed and ColossalAI


def without_device_ids(module: ModuleType) -> None:
    """DistributedDataParallel of a module on the CPU ignores the devices that tests give it."""
    ddp: Any = module.DistributedDataParallel
    init = ddp.__init__

    def without_devices(
        self: Any, model: Any, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        init(self, model, **options)

    ddp.__init__ = without_devices


def failures_are_errors(module: ModuleType) -> None:
    """A rank whose test fails by pytest.fail(), or raises nothing where pytest.raises() waits, says
    so: by an exception that is no Exception it would end, and the test wait for it."""
    import pytest

    launcher: Any = module.DistributedExec
    run = launcher._dist_run

    def run_saying_so(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return run(self, *args, **options)
        except pytest.fail.Exception as failed:
            raise AssertionError(str(failed)) from None

    run_saying_so.__name__ = run.__name__
    launcher._dist_run = run_saying_so


def stays(name: str) -> Callable[[ModuleType], None]:
    """Makes cuda() of a class of a module leave it where it is."""

    def change(module: ModuleType) -> None:
        getattr(module, name).cuda = lambda self, *_, **__: self

    return change


def device_is_cpu(module: ModuleType) -> None:
    """torch.cuda.current_device() is the CPU."""
    import torch

    module.current_device = lambda: torch.device("cpu")  # type: ignore[attr-defined]


# Accelerate


def accelerator(module: ModuleType) -> None:
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
