"""A linear layer in parts, each a parameter of its own.

Vocabulary: the weight, (out_features, in_features), is cut into *linear tiles*, out_splits rows of
in_splits each. A *band* is the tiles of one row: all that some of the outputs need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from hetero.stand_ins.construction_uses import rows_of
from hetero.tiling.tiled_weight import TiledWeight, owners_of, real_parameters, replace


class TiledLinear(TiledWeight):
    """torch.nn.Linear whose weight is larger than the memory that a parameter may take.

    Each tile is a torch.nn.Linear, so hetero gathers one at a time, and its gradient is one
    tile's; an activation checkpoint around the layer is not needed for that. As in DeepSpeed's
    zero.TiledLinear, of which the arguments and names are: `linears[o][i]` has the weight of
    output split o and input split i, and the bias of its outputs if i is the last.

    With in_splits=1 results have the bits of torch.nn.Linear as far as torch's matrix products of
    some columns have those of all of them: on x86 CPUs they do for splits that are multiples of 16
    outputs. With more in_splits the products of a band's tiles are each rounded to the dtype and
    summed in fp32. Gradients of the input are sums over bands, which autograd makes in the dtype.

    The names in `state_dict()` are `linears.O.I.weight` and `linears.O.I.bias`. A state of
    torch.nn.Linear (`weight`, `bias`) loads as well, and linear_state_dict() gives one.

    Initial weights have the bits of torch.nn.Linear under the same seed, on the CPU; on other
    devices they are of the same distribution. They are drawn a tile at a time, so that inside
    hetero.ZeroInitContext a tile has to fit the budget, and not the layer.

    Args:
        in_features, out_features: sizes of inputs and outputs.
        bias: whether there is one.
        in_splits, out_splits: number of tiles along inputs and outputs, whose sizes differ by at
            most one. More take less memory, and make smaller matrix products.
        input_is_already_split: the input is a list of in_splits tensors.
        combine_out_splits: the output is one tensor, in place of a list of out_splits.
        device, dtype: of the parameters.

    Raises:
        ValueError: for sizes that cannot be.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, splits, size in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= size:
                raise ValueError(f"{name} must be in [1, {size}], the features, got {splits}")
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.in_ranges = _split(in_features, in_splits)
        self.out_ranges = _split(out_features, out_splits)
        self.linears = torch.nn.ModuleList()
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        where = torch.empty(0, device=device).device

        def add(rows: slice, columns: slice) -> None:
            """Adds a layer without values, for which no random numbers are drawn."""
            if columns.start == 0:
                self.linears.append(torch.nn.ModuleList())
            sizes = columns.stop - columns.start, rows.stop - rows.start
            with torch.device("meta"):
                last = columns.stop == in_features
                linear = torch.nn.Linear(*sizes, bias and last, dtype=dtype)
            real_parameters(linear, where)
            self.linears[-1].append(linear)  # type: ignore[operator]

        # As reset_parameters() has it: kaiming_uniform_(a=sqrt(5)), and 1 / sqrt(fan_in).
        gain = torch.nn.init.calculate_gain("leaky_relu", math.sqrt(5))
        bound, bias_bound = (
            math.sqrt(3.0) * (gain / math.sqrt(in_features)),
            1 / math.sqrt(in_features),
        )
        self._draw(add, lambda piece: piece.uniform_(-bound, bound), dtype, where)
        if bias and where.type != "meta":
            for tile in self._last_tiles():
                with torch.no_grad():
                    tile.bias.uniform_(-bias_bound, bias_bound)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, in_splits: int = 1, out_splits: int = 1, **options: Any
    ) -> TiledLinear:
        """A tiled layer with the values of a plain one, before hetero.initialize().

        Args:
            linear: stays as it is. It may be under construction, not in memory, and larger than
                the budget.
            in_splits, out_splits: as of the class.
            options: input_is_already_split and combine_out_splits of the class.

        Raises:
            ValueError: for sizes that cannot be.
        """
        weight, bias = linear.weight, linear.bias
        with torch.device("meta"):
            tiled = cls(
                linear.in_features,
                linear.out_features,
                bias is not None,
                in_splits,
                out_splits,
                dtype=weight.dtype,
                **options,
            )
        tiled._take(weight)
        for tile, rows in zip(tiled._last_tiles(), tiled.out_ranges, strict=True):
            if bias is not None:
                values = bias.detach()[rows].clone()
                tile.bias = torch.nn.Parameter(values, bias.requires_grad)
        return tiled.train(linear.training)

    @torch.no_grad()
    def copy_params_from(self, linear: torch.nn.Linear) -> None:
        """Takes the values of a plain layer of the same sizes. Raises ValueError for others."""
        if linear.weight.shape != (self.out_features, self.in_features):
            raise ValueError(
                f"a weight of shape {tuple(linear.weight.shape)} does not fit a TiledLinear of "
                f"{self.out_features} x {self.in_features}"
            )
        if (linear.bias is None) != (self._last_tiles()[0].bias is None):
            raise ValueError("one of the two layers has a bias, and the other has none")
        for tile, rows, columns in self._tiles():
            tile.weight.copy_(rows_of(linear.weight, rows)[:, columns])
            if tile.bias is not None:
                tile.bias.copy_(linear.bias[rows])

    def forward(self, input: Any) -> Any:
        """Outputs (..., out_features) for inputs (..., in_features); or lists of their splits."""
        parts = input if self.input_is_already_split else self._input_parts(input)
        if len(parts) != self.in_splits:
            raise ValueError(
                f"the input has {len(parts)} splits, and in_splits is {self.in_splits}"
            )
        outputs = [self._band(band, parts) for band in self.linears]
        if not self.combine_out_splits:
            return outputs
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _input_parts(self, input: torch.Tensor) -> Any:
        if self.in_splits == 1:
            return (input,)
        return input.split([part.stop - part.start for part in self.in_ranges], -1)

    def _band(self, band: Any, parts: Any) -> torch.Tensor:
        if self.in_splits == 1:
            made: torch.Tensor = band[0](parts[0])
            return made
        total: torch.Tensor | None = None
        for tile, part in zip(band, parts, strict=True):
            made = tile(part)
            total = made.float() if total is None else total + made
        assert total is not None
        return total.to(made.dtype)

    @property
    def bias(self) -> torch.Tensor | None:
        """A copy of the whole bias, (out_features,), without gradient; None if there is none."""
        tiles = self._last_tiles()
        if tiles[0].bias is None:
            return None
        return torch.cat([tile.bias.detach() for tile in tiles])

    def linear_state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """The state of a torch.nn.Linear with the same values, in memory that no budget counts."""
        found = {f"{prefix}weight": self.weight}
        bias = self.bias
        return found if bias is None else {**found, f"{prefix}bias": bias}

    def to_linear(self) -> torch.nn.Linear:
        """A plain layer with the same values."""
        state = self.linear_state_dict()
        with torch.device("meta"):
            linear = torch.nn.Linear(self.in_features, self.out_features, "bias" in state)
        for name, values in state.items():
            setattr(linear, name, torch.nn.Parameter(values))
        return linear.train(self.training)

    def _places(self) -> Iterator[tuple[str, slice, slice]]:
        for o, rows in enumerate(self.out_ranges):
            for i, columns in enumerate(self.in_ranges):
                yield f"linears.{o}.{i}", rows, columns

    def _last_tiles(self) -> list[torch.nn.Linear]:
        """Those that have the bias, if there is one."""
        return [band[-1] for band in self.linears]  # type: ignore[index]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )


def tile_linears(
    model: torch.nn.Module, max_numel: int, in_splits: int = 1
) -> dict[str, TiledLinear]:
    """Puts a TiledLinear in the place of each torch.nn.Linear of a model that is too large.

    Before hetero.initialize(). Layers whose weight is tied to another module's stay, and so do
    subclasses of torch.nn.Linear, and the model itself.

    Args:
        model: is changed in place.
        max_numel: elements of a weight; a larger one is cut into tiles of at most so many.
        in_splits: tiles along the inputs of each; as many bands as it takes are made then.

    Returns:
        The new layers by name.

    Raises:
        ValueError: for a number that cannot be.
    """
    if max_numel < 1:
        raise ValueError(f"max_numel must be 1 or more, got {max_numel}")
    owners = owners_of(model)
    made: dict[str, TiledLinear] = {}
    for linear in list(model.modules()):
        if type(linear) is not torch.nn.Linear or linear.weight.numel() <= max_numel:
            continue
        if linear is not model and len(owners[id(linear.weight)][1]) == 1:
            splits = min(in_splits, linear.in_features)
            rows = max(1, max_numel // -(-linear.in_features // splits))
            tiled = TiledLinear.from_linear(linear, splits, -(-linear.out_features // rows))
            made |= dict.fromkeys(replace(model, linear, tiled), tiled)
    return made


def _split(size: int, splits: int) -> list[slice]:
    """As torch.tensor_split() does: the first ones are larger by one."""
    small, larger = divmod(size, splits)
    begins = [index * small + min(index, larger) for index in range(splits + 1)]
    return [slice(begin, end) for begin, end in pairwise(begins)]
