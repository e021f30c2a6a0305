"""OneFlow's names: `from hetero.compat import oneflow as flow`, for `import oneflow as flow`.

A module or tensor is *global* in OneFlow if a placement says on which ranks it is and an SBP how it
is divided: split along a dimension, or broadcast. Here each rank has its own part of the data, and
the engine has the parameters. Names that are not here are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from hetero.api.optimizer import HybridOptimizer, unmanaged
from hetero.compat.key_table import KeyTable, log_given
from hetero.compat.late_start import start
from hetero.compat.module_paths import mirrored
from hetero.compat.optimizers import hybrid_optimizer, optimizers_of
from hetero.compat.ranks import join, ranks
from hetero.config import Config

METHODS = KeyTable(
    "nn.Graph.config",
    taken="set_hetero_options enable_zero set_zero_redundancy_optimizer_mode enable_amp",
    not_needed={
        "the engine divides parameters, and graphs run as they are written": """shard_min_size
            set_zero_redundancy_optimizer_min_size_after_split shard_restore_level
            set_outputs_buffer_size allow_fuse_add_to_output allow_fuse_model_update_ops
            allow_fuse_cast_scale enable_cudnn_conv_heuristic_search_algo"""
    },
    refused={
        "call torch.compile(model) instead": "enable_xla_jit enable_tensorrt enable_openvino",
        "build() may call backward() for each part of the data": "set_gradient_accumulation_steps",
    },
)
_MAKERS = "arange empty eye full linspace ones rand randint randn randperm tensor zeros"
sbp = SimpleNamespace(broadcast=None, split=lambda dim: dim)  # the dimension that is split, or None


def placement(type: str, ranks: Sequence[int]) -> list[int]:
    """The ranks that have something, which must be all; `type` has no effect."""
    join()
    return list(ranks)


class _Global:
    """Methods that OneFlow's modules and tensors have beside torch's."""

    def to_global(self, placement: Any = None, sbp: Any = None) -> Any:
        """The same, which is this rank's part.

        Raises ValueError unless all ranks have it: modules whole, tensors whole or some rows.
        """
        if placement is not None and sorted(placement) != list(range(ranks())):
            raise ValueError(f"the placement has the ranks {placement}, not all {ranks()} ranks")
        for dim in sbp if isinstance(sbp, (list, tuple)) else [sbp]:
            if dim is not None and (dim or isinstance(self, torch.nn.Module)):
                raise ValueError(
                    f"sbp splits dimension {dim}: data may be split along dimension 0, and a model "
                    f"is broadcast (config.enable_zero() of its graph shares it out)"
                )
        return self.as_subclass(torch.Tensor) if isinstance(self, Tensor) else self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of torch, but a module stays on the CPU, and a tensor does without a GPU."""
        if isinstance(self, torch.nn.Module) or not torch.cuda.is_available():
            rest = tuple(each for each in args if not isinstance(each, (str, int, torch.device)))
            device = len(rest) < len(args) or kwargs.pop("device", None)
            log_given("to", "the engine brings values to where compute happens", device=device)
            args = rest
        return super().to(*args, **kwargs) if args or kwargs else self  # type: ignore[misc]

    def cuda(self, device: Any = None) -> Any:
        """As to("cuda")."""
        return self.to("cuda")


class Tensor(_Global, torch.Tensor):  # type: ignore[misc]
    """torch's, with to_global()."""


class CrossEntropyLoss(_Global, torch.nn.CrossEntropyLoss):
    """torch's; labels of shape (N, 1) are those of shape (N,)."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        is_column = target.ndim == 2 == input.ndim and target.shape[1] == 1 < input.shape[1]
        return super().forward(input, target.squeeze(1) if is_column else target)


class GraphConfig:
    """A graph's options, before its first call. ValueErrors name those that cannot be."""

    def __init__(self) -> None:
        self.made = Config.make(backend="auto", dtype="fp32", zero_stage=1)

    def set_hetero_options(self, **options: Any) -> None:
        """Sets options of hetero.Config; the last value of one counts."""
        self.made = Config.make(self.made, **options)

    def enable_zero(self, mode: bool = True, *, stage: int = 2, **not_needed: Any) -> None:
        """Shards optimizer state (stage 1), gradients, too (2), and parameters, too (3)."""
        METHODS.read(not_needed)
        self.set_hetero_options(zero_stage=stage if mode else 1)

    def enable_amp(self, mode: bool = True, *, dtype: Any = None) -> None:
        """Keeps parameters in bf16 with fp32 masters, whatever the dtype; in fp32 if not `mode`."""
        log_given("enable_amp", "bf16 needs no loss scale", dtype=dtype)
        self.set_hetero_options(dtype="bf16" if mode else "fp32")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda mode=True: METHODS.read({name: mode})


class Graph:
    """A training step, or an inference, as one call.

    A subclass assigns its modules in __init__(), adds an optimizer to train them, and writes
    build(); with an optimizer build() calls backward() on the loss. Each call makes one step.
    """

    def __init__(self) -> None:
        self.config = GraphConfig()
        self._optimizer: HybridOptimizer | None = None
        self._scheduler: Any = None
        self._root: torch.nn.Module | None = None  # the engine does not keep it alive

    def add_optimizer(self, optim: torch.optim.Optimizer, *, lr_sch: Any = None) -> None:
        """Trains the parameters of this optimizer; each call steps `lr_sch`, a scheduler of it.

        Raises ValueError for an optimizer that hetero has not, and for a second one.
        """
        if self._optimizer is not None:
            raise ValueError("the graph has an optimizer; give its param groups to one")
        self._optimizer, self._scheduler = hybrid_optimizer(optim), lr_sch

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The work of a call; a subclass writes it."""
        raise NotImplementedError("a graph needs build()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """build(), and with an optimizer an update.

        Raises as hetero.initialize() at the first call, and as step() of hetero's optimizers.
        """
        if self._optimizer is None:
            with torch.no_grad():
                return self.build(*args, **kwargs)
        if self._optimizer in unmanaged:
            found = [each for each in vars(self).values() if isinstance(each, torch.nn.Module)]
            trained = [each for each in found if next(each.parameters(), None) is not None]
            self._root = trained[0] if len(trained) == 1 else torch.nn.ModuleList(trained)
            start(self._root, self._optimizer, self.config.made)
        self._optimizer.zero_grad()
        outputs = self.build(*args, **kwargs)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return outputs


def _module_class(name: str) -> Any:
    """torch.nn's, of which classes of modules may be made global."""
    found = getattr(torch.nn, name)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        found = type(name, (_Global, found), {"__module__": nn.__name__})
        setattr(nn, name, found)
    return found


nn, optim = mirrored(f"{__name__}.nn", {}), optimizers_of("oneflow.optim")
vars(nn).update(Graph=Graph, CrossEntropyLoss=CrossEntropyLoss, __getattr__=_module_class)


def __getattr__(name: str) -> Any:
    make = getattr(torch, name)
    if name not in _MAKERS.split():
        return make

    @wraps(make)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return make(*args, **kwargs).as_subclass(Tensor).to(device=device)

    return made
