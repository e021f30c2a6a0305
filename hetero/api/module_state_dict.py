"""model.state_dict() and model.load_state_dict() over managed parameters, names unchanged."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from hetero.api.whole_state import store_values
from hetero.runtime.engine import Engine
from hetero.runtime.modules.call_stack import EnteredCalls, FramePlace, module_frame
from hetero.runtime.modules.module_hooks import ModelHook, ModelHooks
from hetero.stand_ins.offloaded_tensor import ParamAlias
from hetero.state.managed_param import ManagedParam, ParamState
from offload.errors import HeteroError
from offload.interrupts import uninterrupted

_WITHOUT_VALUES = (ParamState.OFFLOADED, ParamState.UPDATING)


class StateDictHooks(ModelHooks):
    """Makes a model's state_dict() whole, and lets load_state_dict() take any float dtype.

    state_dict() has tensors with a storage of their own, in the compute dtype: over the parameter's
    own bytes, or copies of offloaded parameters, in RAM that no budget counts. Values that are
    loaded become the masters, unrounded, and parameters their rounding; the optimizer's states
    stay. Where a value of the compute dtype is the parameter's already, so does its master: model
    and optimizer may be loaded in either order.
    """

    def __init__(self, model: torch.nn.Module, engine: Engine) -> None:
        super().__init__(engine.lifetime.hooks, EnteredCalls())
        self._engine = engine
        self._hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._tied: set[ManagedParam] = set()  # have several names
        self._last_entry: weakref.WeakValueDictionary[ManagedParam, torch.Tensor]
        self._last_entry = weakref.WeakValueDictionary()
        self.cover(model)

    def cover(self, model: torch.nn.Module) -> None:
        names = Counter(m for module in model.modules() for m in self._own(module).values())
        self._tied = {managed for managed, count in names.items() if count > 1}
        for module in model.modules():
            if module not in self._hooked and self._own(module):
                self._hooked.add(module)
                self._hook(module)

    def _own(self, module: torch.nn.Module) -> dict[str, ManagedParam]:
        """The module's own parameters that are managed now, by name."""
        own = ((n, p) for n, p in module._parameters.items() if p is not None)
        found = ((name, self._engine.params.known(param)) for name, param in own)
        return {name: managed for name, managed in found if managed is not None}

    def _hook(self, module: torch.nn.Module) -> None:
        of = weakref.ref(module)

        @uninterrupted
        def fill(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            self._engine.params.check_open()
            self._engine.lifetime.unwind()
            self._engine.steps.schedule.revoke_all()
            for name, managed in self._own(module).items():
                found = state_dict.get(prefix + name)
                if found is not None and found is not managed.param:  # as with keep_vars
                    state_dict[prefix + name] = self._entry(managed, found, state_dict)

        @uninterrupted
        def before_load(
            state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
        ) -> None:
            if metadata.get("assign_to_params_buffers", False):
                raise HeteroError(
                    "load_state_dict(assign=True) would replace managed parameters; "
                    "use assign=False"
                )
            module = of()
            assert module is not None
            frame = module_frame("load")
            self._calls.unwind(FramePlace.of(frame))
            self._engine.check_usable()
            own = self._own(module)
            found = {m: state_dict[prefix + n] for n, m in own.items() if prefix + n in state_dict}
            fitting = {
                m: value
                for m, value in found.items()
                if isinstance(value, torch.Tensor) and value.shape == m.param.shape
            }
            # Before torch's own copy_, which would overwrite the values that tell whether a master
            # may stay, and which then writes what is there already.
            store_values(self._engine, fitting)
            call = self._calls.enter(module, frame)
            call.present.enter_context(self._loading_into(list(own.values())))

        @uninterrupted
        def after_load(module: Any, incompatible: Any) -> None:
            self._calls.leave(module)

        for handle in (
            module._register_state_dict_hook(ModelHook(fill)),
            module._register_load_state_dict_pre_hook(ModelHook(before_load)),
            module.register_load_state_dict_post_hook(ModelHook(after_load)),
        ):
            self._hooks.callback(handle.remove)

    def _entry(
        self, managed: ManagedParam, found: torch.Tensor, state_dict: dict[str, Any]
    ) -> torch.Tensor:
        """What a state dict has of a parameter: a tensor with a storage of its own, as torch's has;
        one for all names of the parameter.

        Whoever writes it to a file sees by the storage which names are of one tensor, and writes no
        more than that.
        """
        last = self._last_entry.get(managed)
        tied = last is not None and managed in self._tied
        if tied and any(entry is last for entry in state_dict.values()):
            assert last is not None
            return last
        # (By the state, too: where torch functions are disabled `found` is the stand-in's memory.)
        if isinstance(found, ParamAlias) or managed.state in _WITHOUT_VALUES:
            # (In no variable, which would pin the gathered copy for the next one's time.)
            entry = managed.part_of(self._engine.params.flat(managed.chunk)).to("cpu", copy=True)
        else:
            # Over the same bytes.
            entry = from_dlpack(torch.to_dlpack(found))  # type: ignore[attr-defined]
        self._last_entry[managed] = entry
        return entry

    @contextmanager
    def _loading_into(self, members: list[ManagedParam]) -> Iterator[None]:
        """Inside the block the parameters have values, and torch may overwrite them by the same.

        So an interruption leaves parameters that are loaded, or are not, and nothing to undo.
        """
        with self._engine.params.present(members):
            try:
                yield
            finally:
                for managed in members:
                    managed.writes.note()
