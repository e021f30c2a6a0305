"""Changes of modules of other projects, so that their tests use hetero, on a machine without GPU.

Each gets a module that was just imported, in every process of a test run. torch and hetero are
imported inside of them: earlier, and the overlays of torch's own modules would come too late.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import TestCase


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


# Accelerate and Transformers


def accelerator(module: ModuleType) -> None:
    """Accelerator is hetero's, and prepare() initializes what it is given, in fp32 and in RAM."""
    import torch

    import hetero
    from hetero.compat.optimizers import hybrid_optimizer
    from hetero.integrations.accelerator import Accelerator

    class ManagedAccelerator(Accelerator):
        def prepare(self, *given: Any, **options: Any) -> Any:
            models = [each for each in given if isinstance(each, torch.nn.Module)]
            torchs = [each for each in given if isinstance(each, torch.optim.Optimizer)]
            if len(models) == 1 and torchs:
                optimizers = [hybrid_optimizer(each) for each in torchs]
                if any(each._engine is None for each in optimizers):
                    hetero.initialize(models[0], optimizers, dtype="fp32", placement_policy="cpu")
            return super().prepare(*given, **options)

    module.Accelerator = ManagedAccelerator  # type: ignore[attr-defined]


def trainer(module: ModuleType) -> None:
    """Trainer is hetero's, in fp32 and in RAM; logs, which tests compare, have no figures of it."""
    import transformers

    from hetero.compat.optimizers import hybrid_optimizer
    from hetero.integrations.trainer import HeteroTrainerMixin

    plain: Any = module.Trainer

    class ManagedTrainer(HeteroTrainerMixin, plain):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            options = {"dtype": "fp32", "placement_policy": "cpu"}
            optimizer, _ = kwargs.get("optimizers", (None, None))
            if optimizer is not None:
                hybrid_optimizer(optimizer)
            super().__init__(*args, hetero_config=options, **kwargs)

        def log(self, *args: Any, **kwargs: Any) -> None:
            plain.log(self, *args, **kwargs)

    # (The package keeps the name's value since hetero's own module has asked for it.)
    module.Trainer = transformers.Trainer = ManagedTrainer  # type: ignore[attr-defined, misc]


def trainer_checkpoints(module: ModuleType) -> None:
    """The tests look for the files of hetero's checkpoints."""

    def check(
        case: Any, output_dir: str, freq: int, total: int, is_pretrained: bool = True, **_: Any
    ) -> None:
        files = {"model.safetensors", "training_args.bin", "trainer_state.json", "hetero"}
        files |= {"config.json"} if is_pretrained else set()
        for step in range(freq, total, freq):
            assert files <= set(os.listdir(f"{output_dir}/checkpoint-{step}"))

    module.TrainerIntegrationCommon.check_saved_checkpoints = check


# PyTorch: a test's optimizers of sharded modules are hetero's, and it compares whole values

_FSDP2_NAMES = (
    "CPUOffloadPolicy FSDPModule MixedPrecisionPolicy OffloadPolicy UnshardHandle fully_shard"
    " register_fsdp_forward_method share_comm_ctx"
)


def fully_shard(module: ModuleType) -> None:
    """FSDP2's names are hetero's; a model that has no optimizer at its first forward gets one."""
    from hetero.api.optimizer import unmanaged
    from hetero.compat import fsdp

    for name in _FSDP2_NAMES.split():
        setattr(module, name, getattr(fsdp, name))
    initialize, kept = fsdp._initialize, []

    def with_optimizer(root: Any) -> None:
        trained = [param for param in root.parameters() if param.requires_grad]
        updated = {
            id(p) for each in unmanaged for group in each.param_groups for p in group["params"]
        }
        if trained and updated.isdisjoint(map(id, trained)):
            kept.append(fsdp.optim.SGD(trained, lr=0.0))
        initialize(root)

    fsdp._initialize = with_optimizer


def optimizers_of_shards(module: ModuleType) -> None:
    """Optimizers of sharded modules are hetero's from their beginning."""

    def then_managed(kind: Any, init: Callable[..., None]) -> Callable[..., None]:
        def made(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **options)
            if type(self) is not kind:
                return
            from hetero.api.optimizer import unmanaged
            from hetero.compat import fsdp
            from hetero.compat.optimizers import hybrid_optimizer

            sharded = {id(param) for each in fsdp._sharded for param in each.parameters()}
            if any(id(p) in sharded for group in self.param_groups for p in group["params"]):
                unmanaged.add(hybrid_optimizer(self))

        return made

    for name in ("Adam", "AdamW", "SGD"):
        kind = getattr(module, name)
        kind.__init__ = then_managed(kind, kind.__init__)


def without_gpus(module: ModuleType) -> None:
    """Tests that ask for GPUs run on the CPU."""
    module.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test  # type: ignore[attr-defined]


def whole_values(module: ModuleType) -> None:
    """The test kit starts few ranks, and compares whole parameters and gradients."""
    test: Any = module.FSDPTest
    test._run = classmethod(module.FSDPTestMixin._run.__func__)

    def with_ranks(most: int) -> Callable[[Any], None]:
        def limit(kind: Any) -> None:
            own = kind.__dict__.get("world_size")
            if own is not None:
                # (0 is the number of GPUs.)
                kind.world_size = property(lambda test: min(most, own.fget(test) or most))

        return limit

    for kind, most in ((test, 2), (module.FSDPTestMultiThread, 1)):
        kind.__init_subclass__ = classmethod(with_ranks(most))
        kind.assertIsInstance = _assert_is_instance
    module.check_sharded_parity = _check_parity  # type: ignore[attr-defined]


_is_instance = TestCase.assertIsInstance


def _assert_is_instance(case: TestCase, value: object, kind: Any, msg: Any = None) -> None:
    """assertIsInstance(), which says of itself that hetero's parameters are not DTensors."""
    if getattr(kind, "__name__", "") == "DTensor" and not isinstance(value, kind):
        raise NotThere("parameters that are DTensors")
    _is_instance(case, value, kind, msg)


def _check_parity(
    case: Any, replicated: Any, sharded: Any, prefixes_to_ignore: tuple[str, ...] = ()
) -> None:
    """The test kit's check_sharded_parity(), which compares parts of DTensors."""
    from torch.testing import assert_close

    import hetero

    pairs = zip(replicated.named_parameters(), sharded.named_parameters(), strict=True)
    for (expected_name, expected), (name, param) in pairs:
        for prefix in prefixes_to_ignore:
            name = name.replace(prefix, "")
        assert name == expected_name
        if not hasattr(param, "_hetero_engine"):
            assert_close(param, expected)
            continue
        with hetero.gathered(param):
            assert_close(param, expected)
        if expected.grad is None:
            assert param.grad is None
        else:
            assert_close(hetero.grads(param)[0], expected.grad)
