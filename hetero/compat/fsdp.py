"""FSDP2's fully_shard() over hetero's engine: `from hetero.compat.fsdp import fully_shard`.

    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)     # hetero.compat.fsdp.optim, or hetero's

The first forward with gradients initializes the engine of the outermost module, when the optimizers
are there; until then parameters are as they were made, on the meta device perhaps.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from hetero.api.access import masters, no_sync
from hetero.api.optimizer import HybridOptimizer, unmanaged
from hetero.compat import optimizers as optim
from hetero.compat.dtypes import NAMES, cast
from hetero.compat.key_table import KeyTable, log_not_needed
from hetero.compat.late_start import start
from hetero.compat.ranks import ranks
from hetero.config import Config
from hetero.runtime.engine import Engine
from hetero.runtime.modules.module_hooks import ModelHook
from hetero.state.managed_param import ManagedParam
from hetero.tiling.forward_swap import swapped_class
from offload.errors import HeteroError

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "optim",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

ARGUMENTS = KeyTable(
    "fully_shard",
    taken="mesh reshard_after_forward mp_policy offload_policy",
    not_needed={"a chunk is divided evenly, wherever tensors end": "shard_placement_fn"},
    refused={
        "freeze them (requires_grad_(False)): they get no optimizer state": "ignored_params",
        "give a mesh of one or two dimensions": "dp_mesh_dims",
    },
)
METHODS = KeyTable(
    "FSDPModule",
    taken="""set_requires_gradient_sync set_gradient_divide_factor
        set_reduce_scatter_divide_factor""",
    not_needed={
        "the engine brings parameters in and out, updates and overlaps in its own order": """
            unshard reshard set_modules_to_forward_prefetch set_modules_to_backward_prefetch
            set_reshard_after_forward set_reshard_after_backward set_is_last_backward
            set_unshard_in_backward set_requires_all_reduce reset_iter_state
            set_post_optim_event""",
        "ranks exchange parts and sum them in fp32, in a fixed order": """
            set_allocate_memory_from_process_group_for_comm set_force_sum_reduction_for_comms
            set_reduce_scatter_max_input_buffers set_separate_reduce_scatter_group
            set_symm_mem_for_comm""",
    },
    refused={
        "communication is the engine's; change gradients between backward and step()": """
            set_all_reduce_hook set_custom_all_gather set_custom_reduce_scatter""",
        "zero_grad(set_to_none=False) updates parameters without a gradient by zeros": """
            set_reduce_scatter_unused_params""",
    },
)


@dataclasses.dataclass
class _Sharding:
    """What fully_shard() and the methods of a module were told of it.

    Attributes:
        same: by FSDP2's names, what all modules of one engine must say alike.
        precision: the policy of dtypes.
        dtype: that modules compute in, by hetero's name.
        options: hetero's.
    """

    same: dict[str, Any]
    precision: MixedPrecisionPolicy
    dtype: str
    options: dict[str, Any]
    divide_factor: float | None = None  # of gradients; None: the number of ranks
    is_divided: bool = False  # hooks follow the factor
    syncs: bool = True
    unsynced: ExitStack = dataclasses.field(default_factory=ExitStack)  # the open no_sync()


_sharded: weakref.WeakKeyDictionary[torch.nn.Module, _Sharding] = weakref.WeakKeyDictionary()


class UnshardHandle:
    """The handle of FSDPModule.unshard(); its wait() does nothing."""

    def wait(self) -> None:
        """Parameters come in wherever they are used."""


class FSDPModule:
    """The class that fully_shard() adds to a module's.

    The first call with gradients, of it or of a module inside, initializes the outermost's engine.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_by(super().__call__, args, kwargs)  # type: ignore[misc]

    def _forward_by(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A forward of the module, by its forward() or another method of it."""
        module: Any = self
        if torch.is_grad_enabled() and not _is_managed(module):
            _initialize(_outermost(module))
        precision = _sharded[module].precision
        if _is_managed(module):  # before that parameters are as they were made
            args, kwargs = cast((args, kwargs), precision.param_dtype)
        output = function(*args, **kwargs)
        return cast(output, precision.output_dtype)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Not needed: parameters come in wherever they are used. With async_op a handle is made."""
        METHODS.read({"unshard": True})
        return UnshardHandle() if async_op else None

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """False: from now on gradients are only added up on each rank, as in hetero.no_sync().

        True: the next backward averages them. Raises ValueError for recurse=False: this is for the
        whole model.
        """
        if not recurse:
            raise ValueError("set_requires_gradient_sync(recurse=False): it is for whole models")
        module: Any = self
        root = _outermost(module)
        whole = _sharded[root]
        whole.syncs = requires_gradient_sync
        if _is_managed(root):
            whole.unsynced.close()
            if not whole.syncs:
                whole.unsynced.enter_context(no_sync(root))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients are the ranks' sum divided by `factor`, instead of by the number of ranks.

        This is for the parameters whose nearest fully sharded module this one is.
        """
        module: Any = self
        _sharded[module].divide_factor = float(factor)
        if _is_managed(module):
            _divide_gradients(module)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS.keys:
            return super().__getattr__(name)  # type: ignore[misc]

        def accept(*args: Any, **_: Any) -> None:
            METHODS.read({name: args[0] if args else True})

        return accept


def register_fsdp_forward_method(module: torch.nn.Module, method_name: str) -> None:
    """Makes a method of a fully sharded module do what its forward does besides: initialize, cast.

    Raises ValueError if there is no such method. For other modules nothing is done.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    module.__dict__[method_name] = partial(_call_method, module, method_name)


def _call_method(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """A method of the module's class, of a copy of the module, too."""
    method = getattr(type(module), name).__get__(module)
    is_sharded = isinstance(module, FSDPModule)
    return module._forward_by(method, args, kwargs) if is_sharded else method(*args, **kwargs)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Not needed: one engine has one order of communication."""
    log_not_needed("share_comm_ctx", "one engine has one order of communication")


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    **options: Any,
) -> Any:
    """Says how the state of a module is to be kept; the outermost module's engine keeps all.

    Layers may be given first, as FSDP2 wants it: their policies must say the same, but that some
    may keep fp32 (mp_policy.param_dtype None or torch.float32) beside others.

    Args:
        module: a module, or a list of some.
        mesh: one dimension shards, two replicate and shard. Default: all ranks shard.
        reshard_after_forward: False: parameters stay whole on each rank (stage 2).
        mp_policy: dtypes. Default: fp32. Gradients are kept in fp32, as FSDP2 keeps them.
        offload_policy: CPUOffloadPolicy() keeps all state in RAM. Default: placement_policy "auto".
        options: hetero's, as host_memory and nvme_path, of the outermost module; and FSDP2's other
            arguments (`ARGUMENTS`).

    Returns:
        The same module, or list, with FSDPModule among its classes.

    Raises:
        ValueError: for arguments that are refused, and for unknown ones, with the nearest name.
    """
    _, own = ARGUMENTS.read_call(options)
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        log_not_needed(
            "fully_shard: a number as reshard_after_forward",
            "slots keep what is gathered as long as they have room",
        )
    precision = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    dtype = _dtype("param_dtype", precision.param_dtype) or "fp32"
    same = {
        "reshard_after_forward": reshard_after_forward is not False,
        "mesh": mesh,
        "offload_policy": isinstance(offload_policy, CPUOffloadPolicy),
        "mp_policy.reduce_dtype": _dtype("reduce_dtype", precision.reduce_dtype),
    }
    if not precision.cast_forward_inputs:
        raise ValueError(
            "mp_policy: cast_forward_inputs=False: hetero casts a model's inputs always"
        )
    for each in module if isinstance(module, (list, tuple)) else [module]:
        if isinstance(each, FSDPModule):
            raise ValueError(f"fully_shard() was called on this {type(each).__name__} before")
        plain: type = type(each)
        each.__class__ = _sharded_class(plain)
        _sharded[each] = _Sharding(same, precision, dtype, own)
    return module


@cache
def _sharded_class(plain: type) -> type:
    """The class of a fully sharded module; one for each plain class."""

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        """What a module makes of its own class, as slices of a Sequential, is plain."""
        return plain(*args, **kwargs)

    made: type = swapped_class(plain, f"FSDP{plain.__name__}", (FSDPModule,), __new__=new)
    return made


def _is_managed(module: torch.nn.Module) -> bool:
    """Whether an engine has the module's parameters; one without parameters needs none."""
    param = next(module.parameters(), None)
    return param is None or hasattr(param, "_hetero_engine")


def _outermost(module: torch.nn.Module) -> torch.nn.Module:
    """The fully sharded module that no other one has inside, and that has this one."""
    around = [each for each in _sharded if any(m is module for m in each.modules())]
    return max(around, key=lambda each: sum(1 for _ in each.modules()))


def _initialize(root: Any) -> None:
    """Initializes the engine of the outermost module with the optimizers of its parameters.

    Without an optimizer nothing is done: the forward is that of the plain module. Raises ValueError
    for an optimizer that has parameters of other modules, too.
    """
    owned = {id(param) for param in root.parameters()}
    optimizers = [each for each in unmanaged if not owned.isdisjoint(_ids(each))]
    for each in optimizers:
        if not owned.issuperset(_ids(each)):
            raise ValueError(
                f"{type(each).__name__} has parameters outside of the fully sharded "
                f"{type(root).__name__}, and one engine has all that it updates; also call "
                f"fully_shard() on the whole model"
            )
    if not optimizers:
        if root.training:
            raise HeteroError(
                f"the first forward of a fully sharded {type(root).__name__} needs its optimizer: "
                f"make it of hetero.compat.fsdp.optim, or of hetero, and before the forward; or "
                f"evaluate under torch.no_grad()"
            )
        return
    policy = _sharded[root]
    # In the order in which they were made of the model's parameters.
    order = {id(param): number for number, param in enumerate(root.parameters())}
    optimizers.sort(key=lambda each: min(order.get(key, len(order)) for key in _ids(each)))
    given: Any = optimizers[0] if len(optimizers) == 1 else optimizers
    config = _config(root)
    start(root, given, config, mesh=policy.same["mesh"])
    if config.dtype != "fp32":
        _put_masters(root, optimizers[0].engine)
    for module in root.modules():
        if module in _sharded:
            _divide_gradients(module)
    root.set_requires_gradient_sync(policy.syncs)


def _divide_gradients(module: torch.nn.Module) -> None:
    """Makes gradients of the module's own parameters follow its factor, from the next one on."""
    own = _sharded[module]
    if own.is_divided or own.divide_factor is None:
        return
    own.is_divided = True

    def divided(grad: torch.Tensor) -> torch.Tensor:
        assert own.divide_factor is not None
        mesh = own.same["mesh"]
        return grad * ((ranks() if mesh is None else mesh.size()) / own.divide_factor)

    inner = [m for m in module.modules() if isinstance(m, FSDPModule) and m is not module]
    others = {id(param) for m in inner for param in m.parameters()}
    for param in module.parameters():
        if param.requires_grad and id(param) not in others:
            param.register_hook(divided)


def _put_masters(root: torch.nn.Module, engine: Engine) -> None:
    """Has state_dict() give fp32 masters in the place of parameters, as FSDP2's does.

    A parameter with several names gets one tensor, as hetero's own entries are.
    """
    found: weakref.WeakValueDictionary[ManagedParam, torch.Tensor] = weakref.WeakValueDictionary()

    def fill(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        for name, param in module._parameters.items():
            entry = state_dict.get(prefix + name)
            managed = None if param is None else engine.params.known(param)
            if managed is None or entry is None or entry is param:
                continue  # (the parameter itself is there with keep_vars)
            last = found.get(managed)
            if last is None or not any(each is last for each in state_dict.values()):
                last = entry if entry.dtype == torch.float32 else masters([managed.param])[0]
                found[managed] = last
            state_dict[prefix + name] = last

    for module in root.modules():  # after hetero's own hooks
        module._register_state_dict_hook(ModelHook(fill))


def _ids(optimizer: HybridOptimizer) -> Iterable[int]:
    return [id(param) for group in optimizer.param_groups for param in group["params"]]


def _config(root: torch.nn.Module) -> Config:
    """hetero's options, from the policies of the root and of the modules inside it.

    Raises ValueError if two policies say different things that one engine cannot do.
    """
    parts = {name: _sharded[m] for name, m in root.named_modules() if m in _sharded}
    whole = parts[""]
    for name, part in parts.items():
        for what, said in part.same.items():
            if said != whole.same[what]:
                raise ValueError(
                    f"{what} differs between the whole model and {name}, which have one engine; "
                    f"give both the same"
                )
        if part.dtype not in ("fp32", whole.dtype):
            raise ValueError(
                f"mp_policy: param_dtype of {name} is {part.dtype}, and that of the whole model "
                f"{whole.dtype}; a part may have the same one or fp32"
            )
    return Config.make(
        {
            "backend": "auto",
            "dtype": whole.dtype,
            "grad_dtype": "fp32",
            "reduce_dtype": whole.same["mp_policy.reduce_dtype"] or whole.dtype,
            "keep_fp32": [] if whole.dtype == "fp32" else _kept(root, parts),
            "zero_stage": 3 if whole.same["reshard_after_forward"] else 2,
            "placement_policy": "cpu" if whole.same["offload_policy"] else "auto",
            "initial_loss_scale": None,  # as FSDP2's, which leave it to a GradScaler
        },
        **whole.options,
    )


def _kept(root: torch.nn.Module, parts: dict[str, _Sharding]) -> list[str]:
    """The names of parameters whose nearest fully sharded module keeps fp32."""
    kept = []
    for param_name, _ in root.named_parameters():
        around = [name for name in parts if not name or param_name.startswith(f"{name}.")]
        if parts[max(around, key=len)].dtype == "fp32":
            kept.append(param_name)
    return kept


def _dtype(what: str, dtype: torch.dtype | None) -> str | None:
    if dtype is not None and dtype not in NAMES:
        raise ValueError(f"mp_policy: {what} must be a dtype of 16 or 32 bits, not {dtype}")
    return None if dtype is None else NAMES[dtype]
