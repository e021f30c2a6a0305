"""Building a model whose parameters do not all fit in RAM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from os import PathLike
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hetero.config import Config
from hetero.setup.construction import ConstructionArena
from hetero.setup.join_ranks import join_ranks
from offload.errors import BudgetError, HeteroError
from offload.memory.sizes import format_bytes


class _DispatchMode(TorchDispatchMode):
    """Replaces offloaded parameters by their values in every operator's arguments.

    An operator that writes to one thus changes the values, not the stand-in.
    """

    def __init__(self, construction: ConstructionArena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._construction = construction

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._construction.any_offloaded:
            return func(*args, **kwargs)
        stands_for: dict[int, torch.Tensor] = {}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            value = self._construction.real(tensor)
            if value is not tensor:
                stands_for[id(value)] = tensor
            return value

        real_args, real_kwargs = tree_map_only(torch.Tensor, real, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        # In-place operators return their argument: give back the one that the caller has.
        return tree_map_only(torch.Tensor, lambda t: stands_for.get(id(t), t), result)


class ZeroInitContext:
    """Inside the block, parameters of modules are built within the host budget.

    Weights come out bit for bit as in plain construction under the same seed, whatever
    initialisation the modules do. With torch.distributed all ranks build the model together.

        with hetero.ZeroInitContext(placement_policy="nvme", nvme_path="/mnt/nvme"):
            model = GPT2LMHeadModel(config)

    Args:
        config: a Config, a mapping, or the path of a JSON file.
        process_group: the ranks, if not all; as hetero.initialize() takes it.
        mesh: a device mesh of the ranks; as hetero.initialize() takes it.
        options: Config's fields as keywords.

    Raises:
        ValueError, HeteroError: the options cannot work.
        BudgetError: in the block: a parameter alone does not fit the host budget.
    """

    _active: ZeroInitContext | None = None

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | PathLike[str] | None = None,
        *,
        process_group: Any = None,
        mesh: Any = None,
        **options: Any,
    ) -> None:
        made = Config.make(config, **options)
        self.construction = ConstructionArena(made, join_ranks(made, process_group, mesh))
        self._block = ExitStack()  # what ends with it

    def __enter__(self) -> ZeroInitContext:
        if ZeroInitContext._active is not None:
            raise HeteroError("ZeroInitContext is already active; contexts do not nest")
        with ExitStack() as block:
            block.callback(setattr, ZeroInitContext, "_active", None)
            ZeroInitContext._active = self
            self._draw_alike(block)
            original = torch.nn.Module.register_parameter
            block.callback(setattr, torch.nn.Module, "register_parameter", original)
            torch.nn.Module.register_parameter = self._adopting(original)  # type: ignore
            block.enter_context(_DispatchMode(self.construction))
            self._block = block.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._block.close()

    def _adopting(self, register: Callable[..., None]) -> Callable[..., None]:
        """Module.register_parameter() that also puts the parameter under construction."""
        construction = self.construction

        def register_parameter(
            module: torch.nn.Module, name: str, param: torch.nn.Parameter | None
        ) -> None:
            register(module, name, param)
            if param is not None:
                try:
                    construction.adopt(param)
                except BudgetError as error:
                    raise BudgetError(
                        f"building {type(module).__name__}.{name} of shape {tuple(param.shape)} "
                        f"({format_bytes(param.numel() * param.element_size())}): {error}"
                    ) from None

        return register_parameter

    def _draw_alike(self, block: ExitStack) -> None:
        """Makes all ranks draw the first rank's random numbers inside the block.

        Each rank may keep only a part of a parameter, and all parts must be of the same values.
        """
        own = torch.get_rng_state()
        states = self.construction.world.all_gather(own, "ZeroInitContext")
        if not torch.equal(own, states[0]):
            block.callback(torch.set_rng_state, own)
            torch.set_rng_state(states[0])
