"""colossalai.zero: construction within budgets, sharded and placed models, their optimizers.

A model's wrapper has the options that its optimizer's wrapper initializes it with. All arguments
are in argument_keys.py; hetero's own options, as host_memory and nvme_path, are taken besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partialmethod
from typing import Any

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.compat.colossalai import argument_keys as keys
from hetero.compat.dtypes import NAMES, cast
from hetero.compat.grad_scale import ScaledSteps, ScalePolicy
from hetero.compat.key_table import DeclaresArguments
from hetero.compat.late_start import EarlyContext, start
from hetero.compat.optimizers import hybrid_optimizer
from hetero.compat.ranks import join
from hetero.compat.shared_names import BucketTensorShardStrategy as BucketTensorShardStrategy
from hetero.compat.shared_names import TensorShardStrategy as TensorShardStrategy
from hetero.config import Config
from hetero.runtime.engine import Engine
from hetero.setup.initialize import construction_of
from offload.device.cuda_backend import cuda_available

_BASE = {"backend": "auto", "dtype": "fp16", "initial_loss_scale": None}


class ColossalInitContext(EarlyContext):
    """hetero.ZeroInitContext with ColossalAI's arguments, and its own.

    With `shard_param` parameters are sharded over the ranks (stage 3), else whole on each (stage
    2). `shard_strategy` is TensorShardStrategy() or BucketTensorShardStrategy(); None: chunks.

    Raises ValueError for an unknown argument, with the nearest name, and as hetero's.
    """

    def __init__(
        self,
        target_device: Any = None,
        shard_strategy: Any = None,
        shard_param: bool = False,
        **arguments: Any,
    ) -> None:
        values, own = keys.INIT_CONTEXT.read_call(arguments)
        options = {
            **_BASE,
            "dtype": "fp16" if values.get("convert_fp16", True) else "fp32",
            "zero_stage": 3 if shard_param else 2,
            **_strategy(shard_strategy),
        }
        join()
        self._seed, self._dtype = values.get("seed"), values.get("default_dtype")
        self._inside = ExitStack()
        super().__init__(Config.make(options, **own))

    def __enter__(self) -> ColossalInitContext:
        super().__enter__()
        if self._seed is not None:
            self._inside.callback(torch.set_rng_state, torch.get_rng_state())
            torch.manual_seed(self._seed)
        if self._dtype is not None:
            self._inside.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.close()
        super().__exit__(*error)


ZeroInitContext = ColossalInitContext  # as ColossalAI names it


def _strategy(given: Any) -> dict[str, Any]:
    return {} if given is None else {"debug": {"shard_strategy": given}}


def _placement(policy: object) -> str:
    """hetero's placement policy; "cuda" where there is no GPU is "auto"."""
    return "auto" if policy == "cuda" and not cuda_available() else str(policy)


class WrappedModel(torch.nn.Module):
    """A model, with the options that its optimizer's wrapper will initialize it with.

    Names of parameters in state_dict() are the model's. Without an optimizer it is used as it is.

    Attributes:
        module: the model.
        config: the options so far.
        process_group: the ranks to shard over, or None.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: Mapping[str, Any],
        process_group: Any = None,
        outputs_in_fp32: bool = False,
    ) -> None:
        """`options` replace those of the context that built the model."""
        super().__init__()
        if isinstance(module, WrappedModel):
            raise ValueError(f"the model is a {type(module).__name__} already; wrap it once")
        self.module = module
        construction = construction_of(module)
        base = Config.make(_BASE) if construction is None else construction.config
        self.config = Config.make(base, **options)
        self.process_group = process_group
        self._outputs_in_fp32 = outputs_in_fp32

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        outputs = self.module(*args, **kwargs)
        return cast(outputs, torch.float32 if self._outputs_in_fp32 else None)

    def backward(self, loss: torch.Tensor) -> None:
        """loss.backward(); fp16's losses go through the optimizer's backward()."""
        loss.backward()

    def unwrap(self) -> torch.nn.Module:
        """The model."""
        return self.module

    def _of_model(self, name: str, *args: Any, only_rank_0: bool = True, **kwargs: Any) -> Any:
        """A method of the model; a rank that calls it gets the values (only_rank_0 or not)."""
        return getattr(self.module, name)(*args, **kwargs)

    named_parameters = partialmethod(_of_model, "named_parameters")
    named_buffers = partialmethod(_of_model, "named_buffers")
    state_dict = partialmethod(_of_model, "state_dict")
    load_state_dict = partialmethod(_of_model, "load_state_dict")


class ShardedModelV2(WrappedModel):
    """A model with the options that ShardedOptimizerV2 initializes it with.

    The model was built inside ZeroInitContext, or outside, with the ranks of a `process_group`
    then; tensor_placement_policy is "cuda" by default.

    Raises ValueError for an unknown argument, with the nearest name, and for a wrong value.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        shard_strategy: Any = None,
        process_group: Any = None,
        **arguments: Any,
    ) -> None:
        values, own = keys.SHARDED_MODEL.read_call(arguments)
        options = {"placement_policy": _placement(values.get("tensor_placement_policy", "cuda"))}
        if values.get("fp32_reduce_scatter"):
            options["reduce_dtype"] = "fp32"
        super().__init__(module, {**options, **own}, process_group)
        self.config = Config.make(self.config, **_strategy(shard_strategy))


class GeminiDDP(
    DeclaresArguments,
    WrappedModel,
    arguments=lambda module, chunk_config_dict=None, chunk_init_device=None,
    placement_policy="static", enable_gradient_accumulation=None, max_prefetch=None,
    shard_param_frac=1.0, offload_optim_frac=0.0, offload_param_frac=0.0,
    warmup_non_model_data_ratio=None, steady_cuda_cap_ratio=None, search_range_m=None,
    hidden_dim=None, min_chunk_size_m=None, pin_memory=None, force_outputs_fp32=False,
    strict_ddp_mode=False, scatter_after_inference=None, mixed_precision=torch.float16,
    zero_group=None, memstats=None, master_weights=None, extra_dp_group=None, verbose=None,
    enable_async_reduce=None, fp8_communication=None, use_fp8=None, **arguments: None,
):  # fmt: skip
    """A model with the options that GeminiOptimizer initializes it with.

    Its arguments are ColossalAI's, in their order, and hetero's own options: placement_policy
    (default: "static"), mixed_precision, force_outputs_fp32 and others. The model was built inside
    ZeroInitContext, or outside.

    Raises ValueError for an unknown argument, with the nearest name, and for a wrong value.
    """

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        given = self._given(positional, arguments)
        module = given.pop("module")
        values, own = keys.GEMINI.read_call(given)
        dtype = values.get("mixed_precision", torch.float16)
        policy = values.get("placement_policy", "static")
        if dtype not in NAMES:
            raise ValueError(f"GeminiDDP: mixed_precision must be a floating dtype, not {dtype!r}")
        if policy == "static":
            optimizer = values.get("offload_optim_frac", 0.0)
            whole = values.get("offload_param_frac", 0.0) > 0 or optimizer == 1
            policy = "cpu" if whole else "auto" if optimizer > 0 else "cuda"
        stage = 2 if values.get("shard_param_frac", 1.0) == 0 else 3
        options = {
            "placement_policy": _placement(policy),
            "dtype": NAMES[dtype],
            "zero_stage": 1 if values.get("strict_ddp_mode") else stage,
        }
        group = values.get("zero_group", values.get("process_group"))
        super().__init__(module, {**options, **own}, group, bool(values.get("force_outputs_fp32")))

    @staticmethod
    def set_params_to_ignore(params_to_ignore: Iterable[torch.Tensor]) -> None:
        """Accepts frozen parameters, which get no optimizer state.

        Raises:
            ValueError: a parameter requires gradients: the engine has all parameters of a model.
        """
        for param in params_to_ignore:
            if param.requires_grad:
                raise ValueError(
                    f"GeminiDDP.set_params_to_ignore(): a parameter of shape {tuple(param.shape)} "
                    f"requires gradients, and hetero manages all of a model; freeze it "
                    f"(requires_grad_(False)), or keep its module out of the model"
                )

    def state_dict_shard(
        self,
        prefix: str = "",
        keep_vars: bool = False,
        max_shard_size: float = 1024,
        only_rank_0: bool = True,
        **not_needed: Any,
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """Yields state_dict() in parts of at most max_shard_size MiB, each with its size.

        A tensor that is larger is a part of its own.
        """
        part: dict[str, Any] = {}
        size = 0.0
        for name, value in self.state_dict(prefix=prefix, keep_vars=keep_vars).items():
            more = value.nbytes / 2**20 if isinstance(value, torch.Tensor) else 0.0
            if part and size + more > max_shard_size:
                yield part, size
                part, size = {}, 0.0
            part[name], size = value, size + more
        yield part, size


class ScaledOptimizer(ScaledSteps, torch.optim.Optimizer):
    """An optimizer of hetero's whose losses are scaled under fp16; param groups are hetero's.

    Making one initializes the model: it is hetero.initialize() with the options of the wrapper.
    Under fp16 backward() takes the place of loss.backward().

    Attributes:
        optim: hetero's optimizer.
        model: the wrapper of the model.
        grad_scale: the loss scale, which checkpoints keep.
    """

    def __init__(
        self,
        model: WrappedModel,
        optimizer: torch.optim.Optimizer,
        scale: Mapping[str, Any],
        max_norm: float = 0.0,
        norm_type: float = 2.0,
    ) -> None:
        """`scale`: ColossalAI's arguments of loss scaling; step() clips to a max_norm above 0.

        Raises as hetero.initialize(), and ValueError for a model without wrapper.
        """
        if not isinstance(model, WrappedModel):
            raise ValueError(
                f"the model must be wrapped first, by ShardedModelV2 or GeminiDDP, and is a "
                f"{type(model).__name__}"
            )
        if isinstance(optimizer, ScaledOptimizer):
            raise ValueError(f"the optimizer is a {type(optimizer).__name__} already; wrap it once")
        policy = _scale_policy(scale)
        config = model.config
        self.model, self.optim = model, hybrid_optimizer(optimizer)
        self._clipping = float(max_norm), float(norm_type)
        name = f"step() of the {type(self).__name__}"
        ScaledSteps.__init__(self, self.optim, policy if config.dtype == "fp16" else None, name)
        self.grad_scale = self.scale
        fraction = getattr(optimizer, "nvme_offload_fraction", 0.0)
        if fraction:
            placement = "nvme" if fraction == 1.0 else "auto"
            folder = getattr(optimizer, "nvme_offload_dir", None)
            config = Config.make(config, placement_policy=placement, nvme_path=folder)
        start(model.module, self.optim, config, process_group=model.process_group)

    param_groups = property(lambda self: self.optim.param_groups)
    defaults = property(lambda self: self.optim.defaults)
    state = property(lambda self: self.optim.state)
    loss_scale = property(lambda self: self.scale.value)  # the factor of losses now

    @property
    def engine(self) -> Engine:
        """hetero's engine."""
        return self.optim.engine

    def unwrap(self) -> HybridOptimizer:
        """hetero's optimizer."""
        return self.optim

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of hetero's optimizers."""
        self.optim.add_param_group(param_group)

    def state_dict(self, only_rank_0: bool = True) -> dict[str, Any]:
        """hetero's, and the loss scale; a rank that calls this gets the values."""
        return {**self.optim.state_dict(), "loss_scale": self.scale.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() gave."""
        rest = dict(state_dict)
        scale = rest.pop("loss_scale", None)
        self.optim.load_state_dict(rest)
        if scale is not None:
            self.scale.load_state_dict(scale)

    def clip_grad_norm(self, model: Any, max_norm: float, norm_type: float = 2.0) -> float:
        """Clips the norm (of type 2, or infinity) of all gradients together, once before a step.

        Returns the norm before clipping; -1 if nothing is done, as for a max_norm of 0.
        """
        clipped = max_norm > 0 and self.clip(max_norm, norm_type)
        return self.norm if clipped and self.norm is not None else -1.0

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """As clip_grad_norm()."""
        return self.clip_grad_norm(self.model, max_norm, norm_type)

    def get_grad_norm(self, norm_type: float = 2.0, **_: Any) -> float | None:
        """The norm before the last clipping, of its norm_type; None if none was clipped yet."""
        return self.norm

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One update, after clipping; an overflow skips it, and makes the loss scale smaller.

        Returns False if the step was skipped, else None. Raises ValueError for a closure.
        """
        if closure is not None:
            raise ValueError("closures are not supported with scaled losses; call backward() first")
        if self._clipping[0] > 0:
            self.clip(*self._clipping)
        return None if super().step() else False


def _scale_policy(given: Mapping[str, Any]) -> ScalePolicy:
    """ColossalAI's arguments of loss scaling. Raises ValueError for those that cannot be."""
    return ScalePolicy(
        initial=float(given.get("initial_scale", 2.0**32)),
        growth_interval=given.get("growth_interval", 1000),
        growth_factor=float(given.get("growth_factor", 2)),
        backoff_factor=float(given.get("backoff_factor", 0.5)),
        hysteresis=max(1, given.get("hysteresis", 2)),
        least=float(given.get("min_scale", 1)),
        most=float(given.get("max_scale", math.inf) or math.inf),
    )


class ShardedOptimizerV2(ScaledOptimizer):
    """Initializes a sharded model with its optimizer, and scales losses under fp16.

    The optimizer is of hetero.compat.colossalai.nn.optimizer, of hetero, or torch's Adam, AdamW,
    SGD or Adagrad before its first step.

    Raises ValueError for an unknown argument, with the nearest name, and as hetero.initialize().
    """

    def __init__(
        self, sharded_model: WrappedModel, optimizer: torch.optim.Optimizer, **arguments: Any
    ) -> None:
        super().__init__(sharded_model, optimizer, keys.SHARDED_OPTIMIZER.read(arguments))


class GeminiOptimizer(
    DeclaresArguments,
    ScaledOptimizer,
    arguments=lambda optim, module, gpu_margin_mem_ratio=None, initial_scale=2**32, min_scale=1,
    growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2, max_scale=2**32,
    max_norm=0.0, norm_type=2.0, tp_group=None, params_info=None, verbose=None,
    enable_async_reduce=None, **arguments: None,
):  # fmt: skip
    """As ShardedOptimizerV2, of a GeminiDDP; arguments max_norm and norm_type make step() clip.

    Raises as that.
    """

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        given = self._given(positional, arguments)
        optimizer, model = given.pop("optim"), given.pop("module")
        values = keys.GEMINI_OPTIMIZER.read(given)
        clipping = values.pop("max_norm", 0.0), values.pop("norm_type", 2.0)
        super().__init__(model, optimizer, values, *clipping)
