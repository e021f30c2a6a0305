"""Parameters that come later: those that are frozen now, and those of param groups to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hetero.state.managed_param import ManagedParam, can_train
from offload.errors import HeteroError

if TYPE_CHECKING:
    from hetero.runtime.engine import Engine


class Later:
    """Says which parameters are to be taken in, and when; Engine.extend() does it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._frozen: dict[int, ManagedParam] = {}  # by id(param): those without an optimizer state
        self._never_trained: set[int] = set()  # ids of those that needed no gradient at first
        self._param_groups: Callable[[], Sequence[dict[str, Any]]] = tuple

    def follow(self, param_groups: Callable[[], Sequence[dict[str, Any]]]) -> None:
        """`param_groups` gives the optimizer's groups as they are at the time."""
        self._param_groups = param_groups

    def note(self, managed: ManagedParam) -> None:
        """The parameter has got a home."""
        key = id(managed.param)
        if managed.chunk.trainable:
            self._frozen.pop(key, None)
            return
        self._frozen[key] = managed
        if not managed.param.requires_grad:
            self._never_trained.add(key)

    def take_in_unfrozen(self) -> None:
        """As Engine.take_in_unfrozen()."""
        waiting = [m for m in self._frozen.values() if m.param.requires_grad and self._is_free(m)]
        if not waiting:
            return
        given = {id(p) for group in self._param_groups() for p in group["params"]}
        found = [m.param for m in waiting if id(m.param) in given]
        if found:
            self._engine.extend(found)

    def admit(self, params: Sequence[torch.nn.Parameter]) -> None:
        """As Engine.admit()."""
        wanted = [p for p in params if p.numel() and can_train(p)]
        names = {id(p): name for name, p in self._engine.model.named_parameters()}
        facts = {
            f"number {i}": f"{names.get(id(p), 'a stranger')} {tuple(p.shape)}"
            for i, p in enumerate(wanted)
        }
        self._engine.world.require_equal(facts, "the param groups that are added")
        later = []
        for param in wanted:
            known = self._engine.known(param)
            if known is None:
                later.append(param)
            elif not known.chunk.trainable and param.requires_grad:
                if not self._is_free(known):
                    raise HeteroError(
                        f"{known.name} is in use; call add_param_group() outside hetero.gathered()"
                    )
                later.append(param)
        if later:
            self._engine.extend(later)

    def _is_free(self, managed: ManagedParam) -> bool:
        """Whether nobody uses the parameter, which thus can get another home."""
        return managed.uses == 0 and managed.is_at_home and not managed.changed_unnoticed

    def check_left_out(self, given: Iterable[torch.Tensor]) -> None:
        """Raises HeteroError for a gradient of what was frozen and is in no param group."""
        ids = {id(p) for p in given}
        for key, m in self._frozen.items():
            if key in self._never_trained and m.param.grad is not None and key not in ids:
                raise HeteroError(
                    f"{m.name} was frozen at hetero.initialize() and has a gradient now, but no "
                    f"param group has it; add it with optimizer.add_param_group()"
                )
