"""What the runtime knows about one parameter."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hetero.layout import Chunk, ParamSlice


@dataclass(eq=False)
class ManagedParam:
    """A parameter, its place, and whether it is present.

    An absent parameter keeps shape and dtype and reads NaN: one element, expanded, so that an
    accidental use is loud and an in-place write is refused by torch. The same holds for `.grad`:
    the placeholder `absent_grad` says that the chunk holds a gradient; None, that there is none.
    """

    param: torch.nn.Parameter
    chunk: Chunk
    slice: ParamSlice
    dtype: torch.dtype
    step: int = 0  # optimizer updates made
    uses: int = 0  # modules and gathered() blocks that need the value now
    absent: torch.Tensor = field(init=False)
    absent_grad: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.param.shape
        self.absent = torch.full((), float("nan"), dtype=self.dtype).expand(shape)
        self.absent_grad = torch.full((), float("nan"), dtype=self.dtype).expand(shape)

    @property
    def name(self) -> str:
        """The first name it has in the model."""
        return self.slice.param.name

    @property
    def numel(self) -> int:
        """Elements."""
        return self.slice.param.numel

    @property
    def has_grad(self) -> bool:
        """Whether the chunk holds a gradient of it. Clearing `.grad`, by whomever, clears it."""
        return self.param.grad is self.absent_grad

    def part_of(self, chunk_flat: torch.Tensor) -> torch.Tensor:
        """Its elements of a flat tensor over the chunk, in its shape."""
        return chunk_flat[self.slice.offset : self.slice.end].view(self.param.shape)
