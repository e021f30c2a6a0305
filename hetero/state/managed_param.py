"""What the runtime knows about one parameter."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hetero.chunks.layout import Chunk, Layout, ParamSlice
from hetero.state.grad_placeholder import GradOps, GradPlaceholder
from offload.errors import HeteroError

_CPU = torch.device("cpu")
Range = slice  # in ManagedParam that is the name of a field


def can_train(param: torch.Tensor) -> bool:
    """Whether a parameter can have a gradient: torch's optimizers pass over those that cannot."""
    return param.is_floating_point() or param.is_complex()


def refuse_managed(param: torch.Tensor, name: str) -> None:
    """Raises HeteroError for a parameter that an engine manages: it may be absent."""
    if getattr(param, "_hetero_engine", None) is not None:
        raise HeteroError(
            f"{name} belongs to another engine; build another module and load its state_dict()"
        )


@dataclass(eq=False)
class ManagedParam:
    """A parameter, its place, and whether it is present.

    An absent parameter keeps shape and dtype and reads NaN: one element, expanded, so that an
    accidental use is loud and an in-place write is refused by torch. The same holds for `.grad`:
    the placeholder `absent_grad` says that the chunk holds a gradient; None, that there is none;
    any other tensor, that the user assigned one, which is taken into the chunk when it is needed.
    The gradient is what the chunk holds times `grad_factor`.
    """

    param: torch.nn.Parameter
    chunk: Chunk
    slice: ParamSlice
    dtype: torch.dtype
    device: torch.device = _CPU  # where compute happens
    step: int = 0  # optimizer updates made
    uses: int = 0  # modules and gathered() blocks that need the value now
    version: int = 0  # of the parameter, as of the last change that hetero knows of
    absent: torch.Tensor = field(init=False)
    absent_grad: GradPlaceholder = field(init=False)
    grad_factor: float = 1.0
    grad_ops: GradOps | None = field(default=None, repr=False)
    replaced: bool = False  # the parameter has moved to another chunk group; what is here is stale

    def __post_init__(self) -> None:
        shape = self.param.shape
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self.absent = nan.expand(shape)
        self.absent_grad = GradPlaceholder.of(self, self.dtype, self.device)

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

    def note_change(self) -> None:
        """The parameter was changed in a way that reached its home."""
        self.version = self.param._version

    @property
    def changed_unnoticed(self) -> bool:
        """Whether somebody wrote to the parameter in place outside gathered()."""
        # torch refuses writes to an absent tensor unless it has a single element. (Looking at it
        # on a device would wait for all that the device was given.)
        looks = self.numel == 1 and self.absent.device.type == "cpu"
        written = looks and not bool(torch.isnan(self.absent).all())
        return written or self.param._version != self.version

    def was_written_while_absent(self) -> bool:
        """Whether somebody changed it, or pointed it elsewhere, since it was made absent.

        torch lets fill_() write to an absent tensor of any size; it reads NaN again afterwards.
        """
        one = self.absent.as_strided((), ())
        filled = one.device.type == "cpu" and not bool(one.isnan())
        if filled:
            one.fill_(float("nan"))
        moved = self.param.data_ptr() != self.absent.data_ptr()
        return filled or moved or self.param._version != self.version

    def in_shard(self, layout: Layout, rank: int | None = None) -> tuple[Range, Range]:
        """Its elements in a rank's shard (default: this rank's), and which of its own they are.

        Both are empty if the shard has none of it.
        """
        part = layout.shard.range(layout.chunk_numel(self.chunk), rank)
        first = max(self.slice.offset, part.start)
        last = max(first, min(self.slice.end, part.stop))
        offset = self.slice.offset
        return Range(first - part.start, last - part.start), Range(first - offset, last - offset)

    def part_of(self, chunk_flat: torch.Tensor) -> torch.Tensor:
        """Its elements of a flat tensor over the chunk, in its shape."""
        return chunk_flat[self.slice.offset : self.slice.end].view(self.param.shape)
