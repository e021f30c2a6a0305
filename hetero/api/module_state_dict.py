"""model.state_dict() and model.load_state_dict() over managed parameters, names unchanged."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hetero.api.whole_state import store_masters
from hetero.runtime.engine import Engine
from hetero.runtime.modules.call_stack import EnteredCalls, module_frame
from hetero.state.managed_param import ManagedParam
from offload.errors import HeteroError


class StateDictHooks:
    """Makes a model's state_dict() whole, and lets load_state_dict() take any float dtype.

    state_dict() has copies of offloaded parameters, in the compute dtype, in RAM that no budget
    counts. Values that are loaded become the masters, unrounded, and parameters their rounding; the
    optimizer's states stay.
    """

    def __init__(self, model: torch.nn.Module, engine: Engine) -> None:
        self._engine = engine
        self._handles: list[RemovableHandle] = []
        self._hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._loads = EnteredCalls()
        self._loading: dict[torch.nn.Module, dict[ManagedParam, torch.Tensor]] = {}
        self.cover(model)

    def cover(self, model: torch.nn.Module) -> None:
        """Hooks modules of `model` that have managed parameters and are not hooked yet."""
        for module in model.modules():
            if module not in self._hooked and self._own(module):
                self._hooked.add(module)
                self._hook(module)

    def _own(self, module: torch.nn.Module) -> dict[str, ManagedParam]:
        """The module's own parameters that are managed now, by name."""
        own = (
            (name, self._engine.known(p)) for name, p in module._parameters.items() if p is not None
        )
        return {name: managed for name, managed in own if managed is not None}

    def _hook(self, module: torch.nn.Module) -> None:
        of = weakref.ref(module)

        def fill(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            self._engine.schedule.require_whole("state_dict()")
            for name, managed in self._own(module).items():
                found = state_dict.get(prefix + name)
                if found is not None and found.data_ptr() == managed.stand_in.data_ptr():
                    state_dict[prefix + name] = self._copy(managed)

        def before_load(
            state_dict: dict[str, Any],
            prefix: str,
            metadata: dict[str, Any],
            strict: bool,
            missing: list[str],
            unexpected: list[str],
            errors: list[str],
        ) -> None:
            if metadata.get("assign_to_params_buffers", False):
                raise HeteroError(
                    "load_state_dict(assign=True) would replace managed parameters; "
                    "use assign=False"
                )
            module = of()
            assert module is not None
            self._loads.unwind()
            own = self._own(module)
            found = {m: state_dict[prefix + n] for n, m in own.items() if prefix + n in state_dict}
            self._loading[module] = {
                m: value for m, value in found.items() if value.shape == m.param.shape
            }
            call = self._loads.enter(module, module_frame("load"))
            call.present.enter_context(self._loading_into(module, list(own.values())))

        def after_load(module: Any, incompatible: Any) -> None:
            values = self._loading.pop(module, None)
            if values is None:
                return
            for managed in self._own(module).values():
                managed.note_change()  # by torch's own copy_, into what store_masters() replaces
            self._loads.leave(module)
            store_masters(self._engine, values)

        self._handles += [
            module._register_state_dict_hook(fill),
            module._register_load_state_dict_pre_hook(before_load),
            module.register_load_state_dict_post_hook(after_load),
        ]

    @contextmanager
    def _loading_into(self, module: torch.nn.Module, members: list[ManagedParam]) -> Iterator[None]:
        """Inside the block the parameters have values that torch may overwrite.

        If loading was interrupted, gathered copies that were overwritten are forgotten, so the
        parameters keep their values; the next step refuses a resident one that was overwritten,
        until it is loaded again.
        """
        copied = [m for m in members if not self._engine.params.is_resident(m.chunk)]
        try:
            with self._engine.params.present(members):
                try:
                    yield
                finally:
                    for managed in copied:
                        managed.note_change()
        finally:
            interrupted = self._loading.pop(module, None) is not None
            for managed in copied if interrupted else []:
                self._engine.chunk_group_of(managed).params.discard_copies(managed.chunk)

    def unwind(self) -> None:
        """Ends loads that an exception has interrupted."""
        self._loads.unwind()

    def _copy(self, managed: ManagedParam) -> torch.Tensor:
        part = managed.part_of(self._engine.params.flat(managed.chunk))
        return part.clone() if part.device.type == "cpu" else part.cpu()

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
