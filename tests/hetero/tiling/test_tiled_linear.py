"""hetero/tiling/tiled_linear: torch.nn.Linear in parts; memory is that of a part."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hetero
from hetero import TiledLinear
from hetero.setup.construction_store import ConstructionParam
from hetero.tiling import tiled_linear
from tests.support.training.smallest import smallest_host_memory

OUTPUTS = 320
SHAPES = [(1, 1), (1, 5), (1, 7), (3, 1), (3, 7), (8, 30)]  # in_splits, out_splits


def pair(in_splits: int, out_splits: int, dtype: torch.dtype, bias: bool = True) -> tuple[Any, Any]:
    """A plain layer and a tiled one, of 64 inputs, under one seed."""
    made = []
    for make in (
        lambda: nn.Linear(64, OUTPUTS, bias, dtype=dtype),
        lambda: TiledLinear(64, OUTPUTS, bias, in_splits, out_splits, dtype=dtype),
    ):
        torch.manual_seed(0)
        made.append(make())
    return made[0], made[1]


@given(
    in_features=st.integers(1, 12),
    out_features=st.integers(1, 12),
    in_splits=st.integers(1, 12),
    out_splits=st.integers(1, 12),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    piece_numel=st.sampled_from([1, 7, 1 << 20]),
)
def test_it_is_initialised_with_the_bits_of_linear(
    in_features: int,
    out_features: int,
    in_splits: int,
    out_splits: int,
    bias: bool,
    dtype: torch.dtype,
    piece_numel: int,
) -> None:
    in_splits, out_splits = min(in_splits, in_features), min(out_splits, out_features)
    torch.manual_seed(0)
    plain = nn.Linear(in_features, out_features, bias, dtype=dtype)
    next_number = torch.rand(1)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled_linear, "_PIECE_NUMEL", piece_numel)
        tiled = TiledLinear(in_features, out_features, bias, in_splits, out_splits, dtype=dtype)
    assert torch.equal(torch.rand(1), next_number)
    assert torch.equal(tiled.weight, plain.weight)
    if bias:
        assert torch.equal(tiled.bias, plain.bias)
    else:
        assert tiled.bias is None
    sizes = {tuple(p.shape) for p in tiled.parameters() if p.dim() == 2}
    for dim in (0, 1):
        assert max(size[dim] for size in sizes) - min(size[dim] for size in sizes) <= 1


@pytest.mark.covering(1)
@pytest.mark.parametrize(("in_splits", "out_splits"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients(in_splits: int, out_splits: int, dtype: torch.dtype) -> None:
    """The bits of the plain layer where sums are not divided and tiles are multiples of 16, for
    which the matrix library has one routine; else within twice the plain layer's error: the sum of
    rounded products has 1.4 times as much, and gradients have that of the output besides."""
    plain, tiled = pair(in_splits, out_splits, dtype)
    x = torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    outputs, grads = [], []
    for layer in (plain, tiled):
        own = x.clone().requires_grad_()
        outputs.append(layer(own))
        outputs[-1].float().square().sum().backward()
        grads.append(own.grad)
    weight_grad = torch.cat(
        [torch.cat([tile.weight.grad for tile in band], 1) for band in tiled.linears]
    )
    bias_grad = torch.cat([band[-1].bias.grad for band in tiled.linears])
    if in_splits == 1 and OUTPUTS // out_splits % 16 == 0:
        assert torch.equal(*outputs)
        assert torch.equal(weight_grad, plain.weight.grad)
        assert torch.equal(bias_grad, plain.bias.grad)
    exact = copy.deepcopy(plain).double()
    own = x.double().requires_grad_()
    output = exact(own)
    output.square().sum().backward()
    for reference, found, expected in (
        (output, outputs[1], outputs[0]),
        (exact.weight.grad, weight_grad, plain.weight.grad),
        (own.grad, grads[1], grads[0]),
    ):
        error, plain_error = (
            float((each.double() - reference).detach().norm() / reference.detach().norm())
            for each in (found, expected)
        )
        # Bands' gradients of the input are rounded one by one, and so are their sums.
        allowed = 2 * max(1, out_splits if reference is own.grad else 1) ** 0.5
        assert error <= max(allowed * plain_error, 1e-6)


def test_states_of_plain_layers_load_and_come_back() -> None:
    plain, tiled = pair(3, 7, torch.float32)
    torch.manual_seed(1)
    other = nn.Linear(64, OUTPUTS)
    tiled.load_state_dict(other.state_dict())
    assert torch.equal(tiled.weight, other.weight)
    assert all(map(torch.equal, tiled.linear_state_dict().values(), other.state_dict().values()))
    assert list(tiled.linear_state_dict("up.")) == ["up.weight", "up.bias"]
    own = tiled.state_dict()
    assert set(own) == {
        *(f"linears.{o}.{i}.weight" for o in range(7) for i in range(3)),
        *(f"linears.{o}.2.bias" for o in range(7)),
    }
    again = TiledLinear(64, OUTPUTS, in_splits=3, out_splits=7)
    again.load_state_dict(own)
    assert torch.equal(again.weight, other.weight)
    model = nn.Sequential(tiled, nn.ReLU())
    model.load_state_dict({"0.weight": plain.weight, "0.bias": plain.bias})
    assert torch.equal(tiled.weight, plain.weight)
    for size in (319, 321):
        with pytest.raises(RuntimeError, match="size mismatch for weight: its shape is"):
            tiled.load_state_dict(nn.Linear(64, size).state_dict())


def test_from_linear() -> None:
    plain = nn.Linear(64, 300).bfloat16().eval()
    plain.weight.requires_grad_(False)
    state = torch.get_rng_state()
    tiled = TiledLinear.from_linear(plain, in_splits=2, out_splits=3)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(tiled.weight, plain.weight)
    assert torch.equal(tiled.bias, plain.bias)
    assert not tiled.training
    assert [p.requires_grad for p in tiled.linears[0].parameters()] == [False, False, True]
    assert TiledLinear.from_linear(nn.Linear(4, 4, bias=False), out_splits=2).bias is None


def test_splits_go_in_and_out() -> None:
    _, tiled = pair(1, 4, torch.float32)
    x = torch.randn(5, 64)
    expected = tiled(x)
    tiled.combine_out_splits = False
    assert [part.shape for part in tiled(x)] == [(5, 80)] * 4
    assert torch.equal(torch.cat(tiled(x), -1), expected)
    _, tiled = pair(4, 2, torch.float32)
    expected = tiled(x)
    tiled.input_is_already_split = True
    assert torch.equal(tiled(x.split(16, -1)), expected)
    with pytest.raises(ValueError, match="the input has 2 splits, and in_splits is 4"):
        tiled(x.split(32, -1))


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"in_splits": 0}, "in_splits must be in [1, 8]"),
        ({"out_splits": 5}, "out_splits must be in [1, 4]"),
    ],
)
def test_bad_sizes_are_refused(options: dict[str, int], fact: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fact)):
        TiledLinear(8, 4, **options)  # type: ignore[arg-type]


def test_the_values_of_a_plain_layer() -> None:
    """DeepSpeed's call."""
    plain, tiled = nn.Linear(8, 4), TiledLinear(8, 4, in_splits=2)
    tiled.copy_params_from(plain)
    assert torch.equal(tiled.weight, plain.weight)
    with pytest.raises(RuntimeError, match=r"its shape is \(8, 4\) in the state, and \(4, 8\)"):
        TiledLinear(8, 4).copy_params_from(nn.Linear(4, 8))
    with pytest.raises(RuntimeError, match="Missing key.*bias"):
        TiledLinear(8, 4).copy_params_from(nn.Linear(8, 4, bias=False))


def test_large_layers_of_a_model_are_replaced() -> None:
    tied = nn.Linear(8, 64, bias=False)
    embedding = nn.Embedding(64, 8)
    tied.weight = embedding.weight
    model = nn.ModuleDict(
        {
            "small": nn.Linear(8, 8),
            "large": nn.Sequential(nn.Linear(8, 100), nn.Linear(100, 9)),
            "tied": nn.Sequential(tied, embedding),
            "normed": nn.utils.spectral_norm(nn.Linear(8, 100)),  # its weight is no parameter
        }
    )
    x = torch.randn(3, 8)
    expected = model["large"](x)
    made = hetero.tile_linears(model, max_numel=128)
    assert list(made) == ["large.0", "large.1"]
    assert max(p.numel() for p in model["large"].parameters()) <= 128
    torch.testing.assert_close(model["large"](x), expected)
    assert type(model["tied"][0]) is nn.Linear
    assert type(model["normed"]) is nn.Linear
    assert not hetero.tile_linears(model, max_numel=128), "tiles are small"
    with pytest.raises(ValueError, match="max_numel must be 1 or more"):
        hetero.tile_linears(model, max_numel=0)


def test_hooks_around_a_layer_and_attributes_go_with_it() -> None:
    model, seen = nn.Sequential(nn.Linear(8, 100), nn.Tanh()), []
    linear: Any = model[0]
    linear.mark = "user's"
    handles = [
        linear.register_forward_pre_hook(lambda m, x: (2 * x[0],)),
        linear.register_forward_hook(
            lambda m, x, more, out: seen.append(m) or out + 1, with_kwargs=True
        ),
        linear.register_full_backward_hook(lambda m, to_input, of_output: seen.append(of_output)),
    ]
    x = torch.randn(3, 8, requires_grad=True)
    expected = torch.tanh(nn.functional.linear(2 * x, linear.weight, linear.bias) + 1)
    hetero.tile_linears(model, max_numel=128)
    tiled: Any = model[0]
    made = model(x)
    torch.testing.assert_close(made, expected)
    made.sum().backward()
    assert seen[0] is tiled
    assert seen[1][0].shape == (3, 100)
    assert tiled.mark == "user's"
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(model(x), torch.tanh(linear(x)))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("add", "what"),
    [
        (lambda m: m.weight.register_hook(lambda grad: 2 * grad), "the gradient of its weight"),
        (lambda m: m.bias.register_post_accumulate_grad_hook(print), "the gradient of its bias"),
        (lambda m: m.register_buffer("scale", torch.ones(1)), "scale beside its weight"),
        (lambda m: m.register_state_dict_post_hook(lambda *_: None), r"its state_dict\(\)"),
        (lambda m: setattr(m, "forward", print), "a forward of its own"),
    ],
)
@pytest.mark.parametrize("tile", [hetero.tile_linears, hetero.tile_embeddings])
def test_what_tiles_would_not_have_is_refused(
    tile: Callable[..., Any], add: Callable[[Any], Any], what: str
) -> None:
    embedding, linear = nn.Embedding(128, 8), nn.Linear(8, 128)
    model = nn.ModuleDict({"first": embedding, "last": nn.ModuleList([linear])})
    if tile is hetero.tile_embeddings:
        linear.weight = embedding.weight
    add(linear)
    with pytest.raises(ValueError, match=f"(first|last.0) has .*{what}.*of 1024 or more"):
        tile(model, max_numel=512)
    assert list(model.modules()) == [model, embedding, model["last"], linear], "nothing is changed"


# Under hetero

WIDTH, WIDE, TILES = 128, 2048, 16
LAYER_BYTES = WIDTH * WIDE * 4


class Net(nn.Module):
    """A layer of 1 MiB in fp32 and what makes its output small again."""

    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        if tiled:
            self.up: Any = TiledLinear(WIDTH, WIDE, out_splits=TILES)
            self.down: Any = TiledLinear(WIDE, WIDTH, in_splits=TILES)
        else:
            self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.first(x)).relu())


def trained(tiled: bool, **options: Any) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    with hetero.ZeroInitContext(dtype="fp32", **options):
        model: Any = Net(tiled)
    optimizer: Any = hetero.HybridAdam(model.parameters(), lr=1e-3)
    model, optimizer = hetero.initialize(model, optimizer)
    losses = []
    for step in range(3):
        x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.engine.close()
    return losses, optimizer.engine


def test_each_tile_is_brought_in_once_as_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a row of tiles that do not fit the budget together."""
    moved: list[ConstructionParam] = []
    move_out = ConstructionParam.move_out

    def noted(self: ConstructionParam) -> None:
        moved.append(self)
        move_out(self)

    monkeypatch.setattr(ConstructionParam, "move_out", noted)
    options: dict[str, Any] = {"host_memory": "6MiB", "nvme_path": str(tmp_path)}
    with hetero.ZeroInitContext(dtype="fp32", placement_policy="nvme", **options):
        TiledLinear(2048, 2048, bias=False, in_splits=4)  # of 4 MiB each
    assert len(moved) == 3


def test_a_layer_trains_in_less_memory_than_it_has(tmp_path: Path, nothing_left: None) -> None:
    """Built, gathered and updated a tile at a time: the ledger's peak of RAM is less than the
    layer alone takes; plainly it takes more than one layer."""
    disk: dict[str, Any] = {"placement_policy": "nvme", "nvme_path": str(tmp_path)}
    smallest = smallest_host_memory(
        lambda: trained(True, **disk, host_memory=LAYER_BYTES // TILES + 32768)
    )
    assert smallest < LAYER_BYTES
    with pytest.raises(hetero.BudgetError):
        trained(False, **disk, host_memory=smallest)
    losses, engine = trained(True, **disk, host_memory=smallest)
    assert engine.ledger.peak_bytes["host"] <= smallest
    slot_bytes = engine.chunk_groups[0].layout.slot_numel * 4
    assert slot_bytes < LAYER_BYTES / 4
    in_ram, _ = trained(True, placement_policy="cpu")
    assert losses == in_ram, "placement changes no bits"


def test_a_plain_state_loads_into_a_managed_layer(tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = nn.Linear(WIDTH, WIDE)
    torch.manual_seed(0)
    with hetero.ZeroInitContext(
        dtype="fp32", placement_policy="nvme", nvme_path=str(tmp_path), host_memory="1MiB"
    ):
        model: Any = nn.Sequential(TiledLinear(WIDTH, WIDE, out_splits=TILES))
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    state = {f"0.{name}": values for name, values in other.state_dict().items()}
    model.load_state_dict(state)
    assert all(map(torch.equal, model[0].linear_state_dict().values(), other.state_dict().values()))
    assert torch.equal(copy.deepcopy(model)[0].weight, other.weight)
    optimizer.engine.close()


def test_a_layer_under_construction_that_is_larger_than_the_budget(tmp_path: Path) -> None:
    """9.6 MiB of fp32 in a budget of 4.5 MiB."""
    torch.manual_seed(0)
    plain = nn.Linear(63, 40_000, bias=False)
    torch.manual_seed(0)
    with hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=str(tmp_path), host_memory="4608KiB", dtype="fp32"
    ) as context:
        model = nn.Sequential(nn.Linear(63, 40_000, bias=False))
        assert list(hetero.tile_linears(model, 1 << 16)) == ["0"]
    assert context.construction.ledger.peak_bytes["host"] <= 4608 << 10
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    assert torch.equal(torch.cat(hetero.masters(model.parameters())), plain.weight)
    optimizer.engine.close()
