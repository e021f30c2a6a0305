"""hetero's optimizers with the names and arguments of other projects', in their order."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, NamedTuple

from hetero.api.loaded_state import check_torch_arguments
from hetero.api.optimizer import HybridOptimizer
from hetero.compat.declared_arguments import REQUIRED, DeclaresArguments
from hetero.compat.key_table import log_not_needed

OF_TORCH = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")


class _Argument(NamedTuple):
    """An argument that hetero does not have: the option that it sets, or why it is not needed."""

    default: Any
    option: str = ""
    values: Mapping[bool, str] | None = None  # of the option, by the argument's
    reason: str = ""


_ARGUMENTS = {
    "adam_w_mode": _Argument(True, "adamw_mode"),
    "do_bias_correction": _Argument(True, "bias_correction"),
    "fp32_optimizer_states": _Argument(True, "state_dtype", {True: "fp32", False: "bf16"}),
    "set_grad_none": _Argument(True, reason="zero_grad(set_to_none=False) says it"),
    "contiguous_params": _Argument(False, reason="parameters always lie in chunks"),
    "torch_adam": _Argument(False, reason="hetero has one kernel"),
    # ColossalAI's class takes these itself.
    "nvme_offload_fraction": _Argument(0.0),
    "nvme_offload_dir": _Argument(None),
}


def own_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """hetero's options for another project's arguments; logs once those that are not needed."""
    options: dict[str, Any] = {}
    for argument, value in given.items():
        known = _ARGUMENTS.get(argument)
        if known is None:
            options[argument] = value
        elif known.option:
            options[known.option] = value if known.values is None else known.values[bool(value)]
        elif value != known.default:
            log_not_needed(f"{name}: {argument}", known.reason)
    return options


def pop_torch_options(name: str, options: dict[str, Any]) -> None:
    """Takes torch's own options out of `options`.

    Raises ValueError for those that change the update, as amsgrad and maximize.
    """
    check_torch_arguments(name, {each: options.pop(each, None) for each in OF_TORCH})


class RenamedOptimizer(DeclaresArguments, HybridOptimizer):
    """An optimizer of hetero's that takes the arguments of another project's: see renamed()."""

    _defaults: Mapping[str, Any]

    def __init_subclass__(cls, arguments: str = "", **defaults: Any) -> None:
        super().__init_subclass__()
        if not arguments:
            return
        own = {
            name: parameter.default
            for base in reversed(cls.__mro__)
            if "__init__" in vars(base) and not issubclass(base, RenamedOptimizer)
            for name, parameter in signature(base.__init__).parameters.items()
        }
        own |= {name: argument.default for name, argument in _ARGUMENTS.items()}
        own |= {"amsgrad": False, **defaults}
        first, *names = arguments.split()
        own[first] = REQUIRED
        cls._defaults = defaults
        cls._declare({name: own.get(name) for name in (first, *names)})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._given(args, kwargs)
        params = given.pop(next(iter(self._signature.parameters)))
        super().__init__(params, **own_options(type(self).__name__, {**self._defaults, **given}))


def renamed(
    module: str, name: str, own: type[HybridOptimizer], arguments: str, **defaults: Any
) -> Any:
    """Makes the class `name` of `module`: an optimizer of hetero's with another's arguments.

    Args:
        module: is to have the class under this name.
        name: of the class.
        own: hetero's optimizer.
        arguments: the names in their order: first the parameters; a last one `**name` takes further
            options of hetero's.
        defaults: where they are not hetero's.

    Returns:
        The class.
    """
    doc = f"hetero's {own.__name__} with other arguments."
    members = {"__module__": module, "__doc__": doc}
    return type(name, (RenamedOptimizer, own), members, arguments=arguments, **defaults)
