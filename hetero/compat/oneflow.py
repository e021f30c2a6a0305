"""OneFlow's names: `from hetero.compat import oneflow as flow`, for `import oneflow as flow`.

A module or tensor is *global* in OneFlow if a placement says on which ranks it is and an SBP how it
is divided. Here each rank has its own part of the data, and the engine has the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map, tree_map_only

from hetero.api import optimizers
from hetero.api.optimizer import HybridOptimizer, unmanaged
from hetero.compat.key_table import KeyTable, log_not_needed, nearest
from hetero.compat.late_start import start
from hetero.compat.module_paths import mirrored
from hetero.compat.ranks import join, ranks
from hetero.compat.renamed_optimizers import renamed
from hetero.config import Config

METHODS = KeyTable(
    "nn.Graph.config",
    honoured={
        "set_gradient_accumulation_steps": (
            "inputs are divided along their first dimension; losses are means"
        ),
        "set_hetero_options": "hetero's own options, as `host_memory`",
    },
    mapped={
        "enable_zero": "`zero_stage`; without it 1: the same numbers with less memory",
        "set_zero_redundancy_optimizer_mode": "`zero_stage=1`",
        "enable_amp": '`dtype="bf16"`, which needs no loss scale',
    },
    not_needed={
        "small parameters share a chunk with others": """shard_min_size
            set_zero_redundancy_optimizer_min_size_after_split""",
        "parameters are gathered when they are used": "shard_restore_level",
        "graphs run as they are written": """set_outputs_buffer_size allow_fuse_add_to_output
            allow_fuse_model_update_ops allow_fuse_cast_scale
            enable_cudnn_conv_heuristic_search_algo""",
    },
    refused={"call torch.compile(model) instead": "enable_xla_jit enable_tensorrt enable_openvino"},
)
_MAKERS = "arange empty eye full linspace ones rand randint randn randperm tensor zeros"


@dataclass(frozen=True)
class sbp:
    """oneflow.sbp: a division over ranks, a split along a dimension, or broadcast (None)."""

    dim: int | None = None


sbp.broadcast, sbp.split = sbp(), sbp  # type: ignore[attr-defined]


class placement:
    """oneflow.placement: the ranks that have something, which must be all; `type` has no effect."""

    def __init__(self, type: str, ranks: Sequence[int]) -> None:
        join()
        self.type, self.ranks = type, list(ranks)


def _check_view(place: Any, given: Any, dims: Sequence[int | None], fix: str) -> None:
    """Raises ValueError unless a placement has all ranks, and an SBP one of the dimensions."""
    if place is not None and sorted(place.ranks) != list(range(ranks())):
        raise ValueError(
            f"the placement has the ranks {place.ranks}, and the training {ranks()} ranks; give all"
        )
    for each in given if isinstance(given, (list, tuple)) else [given]:
        if each is not None and each.dim not in dims:
            raise ValueError(fix.format(each.dim))


def _without_devices(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of to() that are no device."""
    args = [each for each in args if not isinstance(each, (str, int, torch.device))]
    return args, {name: value for name, value in kwargs.items() if name != "device"}


class Tensor(torch.Tensor):
    """torch's, with to_global()."""

    def to_global(self, placement: Any = None, sbp: Any = None) -> torch.Tensor:
        """This rank's part; raises ValueError unless all ranks have rows, or everything."""
        _check_view(placement, sbp, [None, 0], "data must be split along dimension 0, not {}")
        return self.as_subclass(torch.Tensor)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of torch.Tensor; without a GPU devices change nothing."""
        if not torch.cuda.is_available():
            args, kwargs = _without_devices(args, kwargs)
        return super().to(*args, **kwargs) if args or kwargs else self


class _Global:
    """Methods that OneFlow's modules have beside torch's."""

    def to_global(self, placement: Any = None, sbp: Any = None) -> Any:
        """The same module; raises ValueError unless it is broadcast to all ranks."""
        fix = "a model's sbp must be broadcast; config.enable_zero() of the graph shares it out"
        _check_view(placement, sbp, [None], fix)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of torch.nn.Module, but parameters stay on the CPU: the engine moves them."""
        kept, named = _without_devices(args, kwargs)
        if len(kept) + len(named) < len(args) + len(kwargs):
            log_not_needed("Module.to: a device", "parameters come to where compute happens")
        return super().to(*kept, **named) if kept or named else self  # type: ignore[misc]

    def cuda(self, device: Any = None) -> Any:
        """As to("cuda")."""
        return self.to("cuda")


class CrossEntropyLoss(_Global, torch.nn.CrossEntropyLoss):
    """torch's; labels of shape (N, 1) are those of shape (N,)."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        is_column = target.ndim == 2 == input.ndim and target.shape[1] == 1 < input.shape[1]
        return super().forward(input, target.squeeze(1) if is_column else target)


class GraphConfig:
    """A graph's options, before its first call. ValueErrors name those that cannot be."""

    def __init__(self) -> None:
        self.accumulation_steps = 1
        self._options: dict[str, Any] = {"backend": "auto", "dtype": "fp32", "zero_stage": 1}
        self._own: dict[str, Any] = {}

    def enable_zero(self, mode: bool = True, *, stage: int = 2, **not_needed: Any) -> None:
        """Shards optimizer state (stage 1), gradients, too (2), and parameters, too (3)."""
        METHODS.read(not_needed)
        self._options["zero_stage"] = stage if mode else 1
        self.made()

    def enable_amp(self, mode: bool = True, *, dtype: Any = None) -> None:
        """Keeps parameters in bf16 with fp32 masters, whatever the dtype; in fp32 if not `mode`."""
        if dtype is not None:
            log_not_needed("enable_amp: dtype", "bf16 needs no loss scale")
        self._options["dtype"] = "bf16" if mode else "fp32"

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Divides each call into so many micro-batches."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"gradient accumulation steps must be 1 or more, not {value!r}")
        self.accumulation_steps = value

    def set_hetero_options(self, **options: Any) -> None:
        """Sets options of hetero.Config, which go before all others."""
        self._own |= options
        self.made()

    def made(self) -> Config:
        """hetero's options."""
        return Config.make(self._options, **self._own)

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS.keys:
            near = nearest(name, list(METHODS.keys))
            raise AttributeError(f"nn.Graph.config has no {name!r}; {near}")
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

    def add_optimizer(self, optim: HybridOptimizer, *, lr_sch: Any = None) -> None:
        """Trains the parameters of this optimizer; each call steps `lr_sch`, a scheduler of it.

        Raises ValueError for another project's optimizer, and for a second one.
        """
        if not isinstance(optim, HybridOptimizer):
            raise ValueError(
                f"the optimizer must be of hetero.compat.oneflow.optim, or of hetero, not "
                f"{type(optim).__name__}"
            )
        if self._optimizer is not None:
            raise ValueError("the graph has an optimizer; give its param groups to one")
        self._optimizer, self._scheduler = optim, lr_sch

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The work of a call; a subclass writes it."""
        raise NotImplementedError("a graph needs build()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """build(), and with an optimizer an update.

        Raises as hetero.initialize() at the first call, and as step() of hetero's optimizers.
        """
        optimizer, steps = self._optimizer, self.config.accumulation_steps
        if optimizer is None:
            with torch.no_grad():
                return self.build(*args, **kwargs)
        if optimizer in unmanaged:
            start(self._modules(), optimizer, self.config.made())
        optimizer.zero_grad()
        outputs = []
        for number in range(steps):
            a, k = tree_map_only(torch.Tensor, partial(_rows, number, steps), (args, kwargs))
            outputs.append(self.build(*a, **k))
        if steps > 1:
            engine = optimizer.engine
            params = [param for group in optimizer.param_groups for param in group["params"]]
            engine.grad_factors.multiply(engine.with_grads(params), 1.0 / steps)
        optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return outputs[0] if steps == 1 else tree_map(_joined, *outputs)

    def _modules(self) -> torch.nn.Module:
        """The module that has all of the graph's."""
        found = [each for each in vars(self).values() if isinstance(each, torch.nn.Module)]
        trained = [each for each in found if next(each.parameters(), None) is not None]
        if not trained:
            raise ValueError(
                f"{type(self).__name__} has an optimizer and no module with parameters; assign "
                f"the model in __init__()"
            )
        self._root = trained[0] if len(trained) == 1 else torch.nn.ModuleList(trained)
        return self._root


def _rows(number: int, steps: int, value: torch.Tensor) -> torch.Tensor:
    """The rows of a micro-batch."""
    if steps == 1 or value.ndim == 0:
        return value
    if value.shape[0] % steps:
        raise ValueError(f"{value.shape[0]} rows of an input cannot be divided into {steps} parts")
    return value.tensor_split(steps)[number]


def _joined(*outputs: Any) -> Any:
    """One output of all micro-batches."""
    if not isinstance(outputs[0], torch.Tensor):
        return list(outputs)
    return torch.stack(outputs) if outputs[0].ndim == 0 else torch.cat(outputs)


def _module_class(name: str) -> Any:
    """torch.nn's, of which classes of modules may be made global."""
    found = getattr(torch.nn, name)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        found = type(name, (_Global, found), {"__module__": nn.__name__})
        setattr(nn, name, found)
    return found


_ADAM = "params lr betas eps weight_decay amsgrad do_bias_correction **options"
_SGD = "params lr momentum dampening weight_decay nesterov **options"
nn, optim = ModuleType(f"{__name__}.nn"), ModuleType(f"{__name__}.optim")
vars(nn).update(Graph=Graph, CrossEntropyLoss=CrossEntropyLoss, __getattr__=_module_class)
vars(optim).update(
    SGD=renamed(optim.__name__, "SGD", optimizers.HybridSGD, _SGD),
    Adagrad=optimizers.HybridAdagrad,
    Adam=renamed(optim.__name__, "Adam", optimizers.Adam, _ADAM),
    AdamW=renamed(optim.__name__, "AdamW", optimizers.Adam, _ADAM, decoupled_weight_decay=True),
)
mirrored(__name__, {"nn": nn, "optim": optim})


def __getattr__(name: str) -> Any:
    """torch's; tensors that it makes may be made global."""
    make = getattr(torch, name)
    if name not in _MAKERS.split():
        return make

    @wraps(make)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return make(*args, **kwargs).as_subclass(Tensor).to(device=device)

    return made
