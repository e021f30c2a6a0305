"""What a call of a block depends on beside its arguments, so that it can be made again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from hetero.runtime.recompute.arguments import version_of
from hetero.state.managed_param import ManagedParam
from offload.errors import StaleGraphError

FindsManaged = Callable[[torch.Tensor], ManagedParam | None]
_Version = tuple[int, int]  # (updates, writes in place)


@dataclass(frozen=True)
class CallState:
    """A block's modules and parameters as one call has found them.

    Attributes:
        training: of each of its modules, whether it trains.
        trained: of each of its parameters, whether it is trained.
        params: the identities of its parameters, and their versions.
        steps: how many steps of the optimizer had been made.
    """

    training: tuple[bool, ...]
    trained: tuple[bool, ...]
    params: tuple[tuple[int, _Version], ...]
    steps: int

    @classmethod
    def of(cls, module: torch.nn.Module, find: FindsManaged, steps: int) -> CallState | None:
        """That of `module` now; None if the call has parameters of its own, as those of
        torch.func.functional_call(), which are gone when backward comes."""
        tensors = list(module.parameters())
        own = all(isinstance(each, torch.nn.Parameter) for each in tensors)
        return (
            None
            if not own
            else cls(
                tuple(each.training for each in module.modules()),
                tuple(each.requires_grad for each in tensors),
                _versions(module, find),
                steps,
            )
        )

    @property
    def kind(self) -> Hashable:
        """The same for calls of alike blocks that save alike."""
        return self.training, self.trained

    def has_changed(self, module: torch.nn.Module, find: FindsManaged) -> bool:
        """Whether the call, which has just ended, has changed a parameter."""
        return _versions(module, find) != self.params

    def check(self, name: str, module: torch.nn.Module, find: FindsManaged, steps: int) -> None:
        """Raises StaleGraphError if the parameters are others now than in the call.

        An update that step() has not confirmed yet is none: who uses a value has it revoked.
        """
        now = _versions(module, find)
        if steps == self.steps:
            same = [(p, w) for p, (_, w) in now] == [(p, w) for p, (_, w) in self.params]
        else:
            same = now == self.params
        if not same:
            raise StaleGraphError(
                f"{name} is to be computed again in backward (option recompute), which needs its "
                f"parameters as they were before an optimizer step, or a write in place, that came "
                f"between this graph's forward and its backward; call backward before that, or use "
                f"recompute='none'"
            )


def _versions(module: torch.nn.Module, find: FindsManaged) -> tuple[tuple[int, _Version], ...]:
    return tuple((id(each), _version(each, find)) for each in module.parameters())


def _version(param: torch.Tensor, find: FindsManaged) -> _Version:
    managed = find(param)
    return (0, version_of(param)) if managed is None else managed.version
