"""What autograd keeps in place of a tensor that it saved."""

from __future__ import annotations

from typing import Protocol

import torch

from hetero.activations.activation import Activation


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the bytes that a strided tensor views in its storage are all that there is to it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.numel() > 0
        and tensor.device.type != "meta"
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


class BringsBack(Protocol):
    """Whoever has the bytes of activations."""

    def unpack(self, saved: SavedActivation) -> torch.Tensor:
        """The tensor that was saved."""

    def forget(self, saved: SavedActivation) -> None:
        """No graph has `saved` any more."""


class SavedActivation:
    """One saved tensor: how to view its activation. It lives as long as the graph that has it."""

    __slots__ = ("_store", "activation", "dtype", "key", "offset", "size", "stride")

    def __init__(
        self,
        store: BringsBack,
        activation: Activation,
        key: int,
        tensor: torch.Tensor,
        begin: int = 0,
    ) -> None:
        """`key` is the saved tensor's in the activation, whose byte `begin` is the first one of the
        storage that `tensor` views."""
        self._store = store
        self.activation = activation
        self.key = key
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset()) + begin // self.dtype.itemsize  # elements

    def view(self, found: torch.Tensor) -> torch.Tensor:
        """The saved tensor over `found`, the bytes that the activation has kept, flat."""
        begin = self.offset - self.activation.begin // self.dtype.itemsize
        usable = len(found) // self.dtype.itemsize * self.dtype.itemsize
        return found[:usable].view(self.dtype).as_strided(self.size, self.stride, begin)

    def unpack(self) -> torch.Tensor:
        """The tensor that was saved.

        Raises:
            StaleGraphError: it was changed in place since.
            BudgetError: what backward has in use leaves no room to bring it back.
            NativeIoError, OSError: it could not be read, or copied. It can be tried again.
            ClosedError: the engine was closed.
        """
        return self._store.unpack(self)

    def __del__(self) -> None:
        self._store.forget(self)
