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

from hetero.stand_ins.construction_uses import arena_of, rows_of
from hetero.tiling.cross_entropy import tile_parts
from hetero.tiling.tiled_weight import TiledWeight, owners_of, replace, require_replaceable

_PIECE_NUMEL = 1 << 20  # elements of the weight that are drawn at a time


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
        self.linears = torch.nn.ModuleList(torch.nn.ModuleList() for _ in self.out_ranges)
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self._draw(bias, dtype, torch.empty(0, device=device).device)

    def _draw(self, bias: bool, dtype: torch.dtype | None, device: torch.device) -> None:
        """Adds the tiles and draws their values, as torch.nn.Linear's reset_parameters() does.

        Random numbers are drawn for a piece of a band at a time, whole rows. Inside
        hetero.ZeroInitContext all tiles of a band may not fit: each is filled before the next one
        is made, so that the band is drawn once for each.
        """
        width, on_cpu = self.in_features, device.type == "cpu"
        gain = torch.nn.init.calculate_gain("leaky_relu", math.sqrt(5))  # kaiming_uniform_()
        bound, bias_bound = math.sqrt(3.0) * (gain / math.sqrt(width)), 1 / math.sqrt(width)
        for band, rows in zip(self.linears, self.out_ranges, strict=True):
            begin = torch.get_rng_state()
            for columns in self.in_ranges:
                sizes = columns.stop - columns.start, rows.stop - rows.start
                with torch.device("meta"):  # it draws nothing
                    tile = torch.nn.Linear(*sizes, bias and columns.stop == width, dtype=dtype)
                for name, param in list(tile.named_parameters()):
                    setattr(tile, name, torch.nn.Parameter(torch.empty_like(param, device=device)))
                band.append(tile)  # type: ignore[operator]
                if device.type not in ("cpu", "meta"):
                    torch.nn.init.uniform_(tile.weight, -bound, bound)
                if on_cpu:
                    torch.set_rng_state(begin)
                for piece in tile_parts(sizes[1], max(1, _PIECE_NUMEL // width)) if on_cpu else ():
                    values = torch.empty(
                        (piece.stop - piece.start, width), dtype=dtype, device="cpu"
                    )
                    values.uniform_(-bound, bound)
                    with torch.no_grad():
                        tile.weight[piece] = values[:, columns]
        for tile in self._last_tiles() if bias and device.type != "meta" else ():
            torch.nn.init.uniform_(tile.bias, -bias_bound, bias_bound)

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

    def copy_params_from(self, linear: torch.nn.Linear) -> None:
        """Takes the values of a plain layer of the same sizes. Raises as load_state_dict().

        The layer may be under construction, and larger than the budget.
        """
        weight, bias = linear.weight, linear.bias
        if arena_of(weight) is None or tuple(weight.shape) != self._sizes:
            self.load_state_dict(linear.state_dict())
            return
        for tile, rows, columns in self._tiles():
            state = {"weight": rows_of(weight, rows)[:, columns]}
            if bias is not None and columns.stop == self.in_features:
                state["bias"] = bias.detach()[rows]
            tile.load_state_dict(state)

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

    Before hetero.initialize(). Layers whose weight is tied to another module's, or no parameter
    (weight_norm(), spectral_norm()), stay, and so do subclasses of torch.nn.Linear, and the model
    itself. The hooks around a layer's forward and backward are then the new one's.

    Args:
        model: is changed in place.
        max_numel: elements of a weight; a larger one is cut into tiles of at most so many.
        in_splits: tiles along the inputs of each; as many bands as it takes are made then.

    Returns:
        The new layers by name.

    Raises:
        ValueError: for a number that cannot be, and for a layer that has more than tiles can have,
            as a hook of its weight's gradient.
    """
    if max_numel < 1:
        raise ValueError(f"max_numel must be 1 or more, got {max_numel}")
    owners = owners_of(model)
    large = [
        module
        for module in model.modules()
        if type(module) is torch.nn.Linear
        and module is not model
        and "weight" in module._parameters
        and module.weight.numel() > max_numel
        and len(owners[id(module.weight)][1]) == 1
    ]
    require_replaceable(model, large)
    made: dict[str, TiledLinear] = {}
    for linear in large:
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
