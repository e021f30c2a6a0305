"""ColossalAI, whose tests compare Gemini with apex and DistributedDataParallel on GPUs.

Here they run on the CPU: what the tests take of their own test kit comes from the checkout, apex is
a loop with fp32 masters, and of the values that a test goes through each is taken once, not each
combination.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from bench.peers_tests.deepspeed import without_device_ids
from bench.peers_tests.peer import Peer
from bench.peers_tests.stand_ins import NotThere

_ZOO = "tests.kit.model_zoo"
# Models that no test here uses, and that other packages or the network bring.
_OTHER_MODELS = (
    *("diffusers", "timm", "torchaudio", "torchvision"),
    *(
        f"transformers.{name}"
        for name in (
            *("albert", "blip2", "bloom", "chatglm2", "command", "deepseek", "deepseek_v3"),
            *("falcon", "gptj", "llama", "mistral", "mixtral", "opt", "qwen2", "qwen3", "sam"),
            *("t5", "vit", "whisper"),
        )
    ),
)


def _parameterize(argument: str, values: Sequence[Any]) -> Callable[..., Any]:
    """Calls a function with each value of each argument at least once."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        inner = getattr(function, "all_values", {})
        plain = getattr(function, "plain", function)

        @functools.wraps(plain)
        def call(**given: Any) -> None:
            for number in range(max(map(len, call.all_values.values()))):  # type: ignore[attr-defined]
                taken = {n: v[number % len(v)] for n, v in call.all_values.items()}  # type: ignore[attr-defined]
                plain(**taken, **given)

        call.all_values = {argument: values, **inner}  # type: ignore[attr-defined]
        call.plain = plain  # type: ignore[attr-defined]
        return call

    return decorate


class _Masters:
    """An optimizer over fp32 copies of a model in fp16, as apex's O2 has it."""

    def __init__(self, model: Any, optimizer: Any, config: Mapping[str, Any]) -> None:
        import torch

        self._scale = float(config.get("loss_scale", 1.0))
        self._optimizer = optimizer
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.params = [(p, torch.nn.Parameter(p.detach().clone().float())) for p in params]
        masters = iter(master for _, master in self.params)
        for group in optimizer.param_groups:
            group["params"] = list(itertools.islice(masters, len(group["params"])))
        model.half()

    def backward(self, loss: Any) -> None:
        (loss.float() * self._scale).backward()
        self.unscale()

    def unscale(self) -> None:
        for param, master in self.params:
            master.grad = None if param.grad is None else param.grad.float() / self._scale

    def step(self) -> None:
        self._optimizer.step()
        for param, master in self.params:
            param.data.copy_(master.data)

    def zero_grad(self) -> None:
        for param, master in self.params:
            param.grad = master.grad = None


def _apex(model: Any, optimizer: Any, config: Mapping[str, Any]) -> tuple[Any, _Masters]:
    import torch

    made = _Masters(model, optimizer, config)

    def halved(module: Any, args: Any, kwargs: Any) -> Any:
        half = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.half() if t.is_floating_point() else t, (args, kwargs)
        )
        return half

    model.register_forward_pre_hook(halved, with_kwargs=True)
    return model, made


@contextmanager
def _scale_loss(loss: Any, optimizer: _Masters, delay_unscale: bool = False) -> Iterator[Any]:
    yield loss.float() * optimizer._scale
    optimizer.unscale()


def _names(module: str) -> Mapping[str, Any]:
    import torch

    if module == "colossalai.accelerator":
        nothing = dict.fromkeys(
            (
                "empty_cache",
                "reset_peak_memory_stats",
                "reset_max_memory_allocated",
                "reset_max_memory_cached",
                "synchronize",
            ),
            lambda *_: None,
        )
        cpu = torch.device("cpu")
        accelerator = SimpleNamespace(
            get_current_device=lambda: cpu, device_count=lambda: 0, name="cpu", **nothing
        )
        return {"get_accelerator": lambda: accelerator}
    if module == "colossalai.testing":
        theirs = runpy.run_path("colossalai/testing/utils.py", run_name=module)
        wrapper = runpy.run_path("colossalai/testing/pytest_wrapper.py", run_name=module)
        return {**theirs, **wrapper, "parameterize": _parameterize}
    if module == "colossalai.utils":
        return {"set_seed": torch.manual_seed}
    if module == "colossalai.zero.gemini.chunk":
        return {"search_chunk_configuration": _chunks}
    if module == "colossalai.legacy.amp":
        return {"convert_to_apex_amp": _apex}
    if module == "apex":
        return {"amp": importlib.import_module("apex.amp")}
    if module == "apex.amp":
        return {
            "initialize": lambda model, optimizer, **config: _apex(model, optimizer, config),
            "master_params": _master_params,
            "scale_loss": _scale_loss,
        }
    return {}


class _Chunk(dict[str, Any]):
    """What the search for chunks found: tests set sizes, and nothing can be read."""

    def __missing__(self, name: str) -> Any:
        raise NotThere(f"colossalai.zero.gemini.chunk.search_chunk_configuration: {name}")


def _chunks(model: Any, **_: Any) -> tuple[dict[int, dict[str, Any]], int, int]:
    import torch.distributed as dist

    return {dist.get_world_size() if dist.is_initialized() else 1: _Chunk()}, 0, 0


def _master_params(optimizer: _Masters) -> Iterable[Any]:
    return (master for _, master in optimizer.params)


def _stays(name: str) -> Callable[[ModuleType], None]:
    """Makes cuda() of a class of a module leave it where it is."""

    def change(module: ModuleType) -> None:
        getattr(module, name).cuda = lambda self, *_, **__: self

    return change


def _no_device(module: ModuleType) -> None:
    """torch.cuda.current_device() is the CPU."""
    import torch

    module.current_device = lambda: torch.device("cpu")  # type: ignore[attr-defined]


PEER = Peer(
    "colossalai",
    {
        "colossalai": "hetero.compat.colossalai",
        "apex": "bench.peers_tests.apex",
        **{f"{_ZOO}.{name}": f"bench.peers_tests.{name}" for name in _OTHER_MODELS},
    },
    (
        "tests/test_zero/test_gemini/test_optim.py",
        "tests/test_zero/test_gemini/test_grad_clip.py",
        "tests/test_zero/test_gemini/test_grad_accum.py",
        "tests/test_zero/test_gemini/test_inference.py",
        "tests/test_zero/test_gemini/test_zeroddp_state_dict.py",
        "tests/test_zero/test_gemini/test_zerooptim_state_dict.py",
        "tests/test_zero/test_gemini/test_gemini_use_rmt.py",
        "tests/test_zero/test_gemini/test_runtime_mem_tracer.py",
        "tests/test_zero/test_gemini/test_search.py",
        "tests/test_zero/test_gemini/test_chunk_mgrv2.py",
        "tests/test_zero/test_gemini/test_chunkv2.py",
        "tests/test_optimizer/test_adam_kernel.py",
        "tests/test_optimizer/test_adam_optim.py",
        "tests/test_optimizer/test_lr_scheduler.py",
        "tests/test_optimizer/test_nvme.py",
    ),
    folder=".",
    names=_names,
    overlays={
        "torch.nn.parallel.distributed": without_device_ids,
        "torch.nn.modules.module": _stays("Module"),
        "torch._tensor": _stays("Tensor"),
        "torch.cuda": _no_device,
    },
    internals=r"chunk_manager|grads_device",
)
