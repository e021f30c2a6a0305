"""PyTorch's tests of fully_shard(), on the CPU, over hetero's.

Ranks are processes, two at most; where the tests' ranks are threads, there is one. A test's
optimizers of sharded modules are made hetero's, and what it compares are whole values.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import TestCase

from bench.peers_tests.peer import Peer
from bench.peers_tests.stand_ins import NotThere

_NAMES = (
    *("CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle"),
    *("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"),
)


def _sharding(module: ModuleType) -> None:
    """FSDP2's names are hetero's; a model that has no optimizer at its first forward gets one."""
    from hetero.api.optimizer import unmanaged
    from hetero.compat import fsdp

    for name in _NAMES:
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


def _optimizers(module: ModuleType) -> None:
    """Optimizers of sharded modules are hetero's from their beginning."""
    for name in ("Adam", "AdamW", "SGD"):
        kind = getattr(module, name)
        kind.__init__ = _then_managed(kind, kind.__init__)


def _then_managed(kind: Any, init: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if type(self) is not kind:
            return
        from hetero.api.optimizer import unmanaged
        from hetero.compat import fsdp
        from hetero.compat.optimizers import hybrid_optimizer

        sharded = {id(param) for each in fsdp._sharded for param in each.parameters()}
        if any(id(param) in sharded for group in self.param_groups for param in group["params"]):
            unmanaged.add(hybrid_optimizer(self))

    return made


def _everywhere(module: ModuleType) -> None:
    """Tests that ask for GPUs run on the CPU."""
    module.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test  # type: ignore[attr-defined]


def _on_the_cpu(module: ModuleType) -> None:
    """The test kit starts few ranks, and compares whole parameters and gradients."""
    test: Any = module.FSDPTest
    test._run = classmethod(module.FSDPTestMixin._run.__func__)
    for kind, most in ((test, 2), (module.FSDPTestMultiThread, 1)):
        kind.__init_subclass__ = classmethod(_with_ranks(most))
        kind.assertIsInstance = _assert_is_instance
    module.check_sharded_parity = _check_parity  # type: ignore[attr-defined]


def _with_ranks(most: int) -> Callable[[Any], None]:
    def limit(kind: Any) -> None:
        own = kind.__dict__.get("world_size")
        if own is not None:
            # (0 is the number of GPUs.)
            kind.world_size = property(lambda test: min(most, own.fget(test) or most))

    return limit


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


PEER = Peer(
    "pytorch",
    {},
    tuple(
        f"test_fully_shard_{name}.py"
        for name in (
            *("init", "state", "training", "clip_grad_norm_", "frozen", "grad_scaler"),
            *("state_dict", "ignore_params"),
        )
    ),
    folder="test/distributed/_composable/fsdp",
    overlays={
        "torch.distributed.fsdp": _sharding,
        "torch.optim": _optimizers,
        "torch.testing._internal.common_distributed": _everywhere,
        "torch.testing._internal.common_fsdp": _on_the_cpu,
    },
    internals=r"full_tensor|to_local|_local_tensor|_spec|placements|device_mesh|'_\w+'|'state'",
)
