"""Names of other projects' modules that their tests import and hetero's users do not need."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from bench.peers_tests.overlays import NotThere

# DeepSpeed

_BUILDERS = (
    "AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder"
    " FusedLambBuilder FusedLionBuilder InferenceBuilder OpBuilder UtilsBuilder"
)
_VALUES = {"MIN_SWAPPABLE_BYTES": 1 << 20}  # which tests choose sizes by
_VERSIONS = dict.fromkeys(("version", "cuda_version", "hip_version"), "0.0")


class _EachOp(dict[str, bool]):
    """Of hetero's kernels all can be used."""

    def __missing__(self, name: str) -> bool:
        return True


def _of(module: str) -> dict[str, Any]:
    """The names of a module of the adapter, which DeepSpeed has in another one, too."""
    found = vars(importlib.import_module(f"hetero.compat.deepspeed{module}"))
    return {name: value for name, value in found.items() if not name.startswith("_")}


def _builders(names: str) -> dict[str, type]:
    return {name: type(name, (), {"NAME": name}) for name in names.split()}


def _schedule_keys() -> dict[str, str]:
    """The names of schedules' arguments as constants."""
    found = {"WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear"}
    for schedule in _of(".runtime.lr_schedules")["SCHEDULES"].values():
        found |= {name.upper(): name for name in inspect.signature(schedule).parameters}
        found[re.sub("(?<=[a-z])(?=[A-Z])", "_", schedule.__name__).upper()] = schedule.__name__
    return {**found, "LR_RANGE_TEST": "LRRangeTest"}


def _gather(output: Any, tensor: Any, *more: Any, **options: Any) -> Any:
    """torch.distributed's, for tensors of no dimension, too, which gloo does not take."""
    import torch.distributed  # not earlier: overlays come over modules that are not imported yet

    return torch.distributed.all_gather_into_tensor(output, tensor.reshape(-1), *more, **options)


# ColossalAI


def _parameterize(argument: str, values: Sequence[Any]) -> Callable[..., Any]:
    """Calls a function with each value of each argument at least once."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        plain = getattr(function, "plain", function)
        all_values = {argument: values, **getattr(function, "all_values", {})}

        @functools.wraps(plain)
        def call(**given: Any) -> None:
            for number in range(max(map(len, all_values.values()))):
                taken = {name: each[number % len(each)] for name, each in all_values.items()}
                plain(**taken, **given)

        vars(call).update(all_values=all_values, plain=plain)
        return call

    return decorate


class _Chunk(dict[str, Any]):
    """What the search for chunks found: tests set sizes, and nothing can be read."""

    def __missing__(self, name: str) -> Any:
        raise NotThere(f"colossalai.zero.gemini.chunk.search_chunk_configuration: {name}")


def _chunks(model: Any, **_: Any) -> tuple[dict[int, dict[str, Any]], int, int]:
    import torch.distributed as dist

    return {dist.get_world_size() if dist.is_initialized() else 1: _Chunk()}, 0, 0


def _accelerator() -> SimpleNamespace:
    import torch

    nothing = "empty_cache reset_peak_memory_stats reset_max_memory_allocated synchronize"
    nothing += " reset_max_memory_cached"
    return SimpleNamespace(
        name="cpu",
        get_current_device=lambda: torch.device("cpu"),
        device_count=lambda: 0,
        **dict.fromkeys(nothing.split(), lambda *_: None),
    )


def _test_kit() -> dict[str, Any]:
    """ColossalAI's own, from the checkout that tests run in."""
    theirs: dict[str, Any] = {}
    for name in ("utils", "pytest_wrapper"):
        theirs |= runpy.run_path(f"colossalai/testing/{name}.py", run_name="colossalai.testing")
    return {**theirs, "parameterize": _parameterize}


def _set_seed(seed: int) -> object:
    import torch

    return torch.manual_seed(seed)


# apex


class _Masters:
    """An optimizer over fp32 copies of a model in fp16, as apex's O2 has it."""

    def __init__(self, optimizer: Any, loss_scale: float) -> None:
        import torch

        self.loss_scale = float(loss_scale)
        self._optimizer = optimizer
        self.params: list[tuple[Any, Any]] = []
        for group in optimizer.param_groups:
            masters = [torch.nn.Parameter(p.detach().clone().float()) for p in group["params"]]
            self.params += zip(group["params"], masters, strict=True)
            group["params"] = masters

    def backward(self, loss: Any) -> None:
        (loss.float() * self.loss_scale).backward()
        self.unscale()

    def unscale(self) -> None:
        for param, master in self.params:
            master.grad = None if param.grad is None else param.grad.float() / self.loss_scale

    def step(self) -> None:
        self._optimizer.step()
        for param, master in self.params:
            param.data.copy_(master.data)

    def zero_grad(self) -> None:
        for param, master in self.params:
            param.grad = master.grad = None


def _apex(model: Any, optimizer: Any, config: Mapping[str, Any]) -> tuple[Any, _Masters]:
    import torch

    made = _Masters(optimizer, config.get("loss_scale", 1.0))
    model.half()

    def halved(module: Any, args: Any, kwargs: Any) -> Any:
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.half() if t.is_floating_point() else t, (args, kwargs)
        )

    model.register_forward_pre_hook(halved, with_kwargs=True)
    return model, made


@contextmanager
def _scale_loss(loss: Any, optimizer: _Masters, delay_unscale: bool = False) -> Iterator[Any]:
    yield loss.float() * optimizer.loss_scale
    optimizer.unscale()


_NAMES: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "deepspeed.comm": lambda: {"all_gather_into_tensor": _gather},
    "deepspeed.ops": lambda: {"__compatible_ops__": _EachOp()},
    "deepspeed.ops.op_builder": lambda: _builders(_BUILDERS),
    "deepspeed.ops.aio": lambda: {"AsyncIOBuilder": type("AsyncIOBuilder", (), {"NAME": "aio"})},
    "deepspeed.utils.torch": lambda: {
        "required_torch_version": lambda **limits: True,
        "register_grad_hook": lambda param, hook: param.register_hook(hook),
        "jit_script_compat": lambda function: function,
    },
    "deepspeed.runtime.utils": lambda: {
        "see_memory_usage": lambda *said, **options: None,
        "required_torch_version": lambda **limits: True,
    },
    "deepspeed.runtime.config": lambda: {"ADAM_OPTIMIZER": "adam", **_of(".options")},
    "deepspeed.runtime.engine": lambda: _of(".engine"),
    "deepspeed.runtime.lr_schedules": _schedule_keys,
    "deepspeed.runtime.swap_tensor": lambda: _VALUES,
    "deepspeed.runtime.swap_tensor.constants": lambda: _VALUES,
    "deepspeed.runtime.zero.partition_parameters": lambda: _of(".zero"),
    "deepspeed.runtime.zero.tiling": lambda: _of(".zero"),
    "deepspeed.git_version_info": lambda: {
        "torch_info": {**_VERSIONS, "nccl_version": "9.9", "bf16_support": True}
    },
    "colossalai.accelerator": lambda: {"get_accelerator": _accelerator},
    "colossalai.testing": _test_kit,
    "colossalai.utils": lambda: {"set_seed": _set_seed},
    "colossalai.zero.gemini.chunk": lambda: {"search_chunk_configuration": _chunks},
    "colossalai.legacy.amp": lambda: {"convert_to_apex_amp": _apex},
    "apex": lambda: {"amp": importlib.import_module("apex.amp")},
    "apex.amp": lambda: {
        "initialize": lambda model, optimizer, **config: _apex(model, optimizer, config),
        "master_params": lambda optimizer: (master for _, master in optimizer.params),
        "scale_loss": _scale_loss,
    },
}


def names_of(module: str) -> Mapping[str, Any]:
    """The further names of a module of a project, by its full name."""
    return _NAMES.get(module, dict)()
