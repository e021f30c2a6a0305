"""Models written by hand: every way of holding, sharing, returning and not using parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import WIDTH, Case, Where, ballasted, mean_square, tokens, vectors


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class TiedHead(nn.Module):
    """An embedding whose weight is also the head's: one parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, WIDTH)
        self.block = Block(dropout=0.1)
        self.head = nn.Linear(WIDTH, 101, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(x)))


class BorrowedHead(nn.Module):
    """Megatron's head: the embedding's weight used by code outside the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, WIDTH)
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.block(self.embedding(x)), self.embedding.weight)


class Recursive(nn.Module):
    """Calls itself, and a child twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.gate = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth == 0:
            return self.block(self.block(x))
        return self(x * self.gate, depth - 1) + self.gate


class SkipsItsBias(nn.Linear):
    """Megatron's linear layers: the bias is returned for a fused kernel to add."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:  # type: ignore
        return F.linear(x, self.weight), self.bias


class ReturnedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = SkipsItsBias(WIDTH, WIDTH)
        self.block = Block()
        self.second = SkipsItsBias(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.first(x)
        x = torch.tanh(self.block(y) + bias)
        y, bias = self.second(x)
        return y + bias


class Bare(nn.Module):
    """Parameters as attributes, in lists and in dictionaries, used while children run."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.list = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": torch.ones(WIDTH), "zero": torch.zeros(WIDTH)})
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x + self.shift)
        for weight in self.list:
            x = torch.tanh(x @ weight)
        stacked = torch.stack(list(self.named.values()))
        return x * stacked[0] + stacked.sum(0) * self.shift


class Routed(nn.Module):
    """Experts of which each step and each rank uses others; some parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        first = self.experts[choice % 5](x)
        second = self.experts[(choice * 3 + 1) % 5](x)
        return self.last(torch.tanh(first) + second)


class Frozen(nn.Module):
    """Frozen parameters before, between and beside trained ones, also in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.middle = Block()
        self.last = nn.Linear(WIDTH, WIDTH)
        for each in (self.base, self.middle):
            each.requires_grad_(False)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.adapter(torch.tanh(self.base(x)))))


class Normed(nn.Module):
    """Batch normalisation: statistics that forward changes, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 96, 3)
        self.norm = nn.BatchNorm2d(96)
        self.last = nn.Conv2d(96, 64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.norm(self.convolution(x))))


class Convolutions(nn.Module):
    """Convolutions of several kinds, and buffers: statistics, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 96, 3)
        self.groups = nn.GroupNorm(4, 96)
        self.depthwise = nn.Conv2d(96, 96, 3, groups=96, padding="same", padding_mode="circular")
        self.transposed = nn.ConvTranspose2d(96, 8, 3, stride=2)
        self.unlearned = nn.BatchNorm2d(8, affine=False)
        self.register_buffer("constant", torch.rand(8, 1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.groups(F.relu(self.first(x)))
        return self.unlearned(self.transposed(self.depthwise(x))) * self.constant.to(x.dtype)


@dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, Any]


class Structured(nn.Module):
    """A dataclass of tensors inside dicts and tuples, and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ModuleDict({"a": Block(), "b": Block()})
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, *, inputs: dict[str, torch.Tensor]) -> Output:
        a, b = self.pair["a"](inputs["x"]), self.pair["b"](inputs["x"])
        return Output(a + b, {"scaled": (a * self.scale, [b, {"none": None}]), "scale": self.scale})


class Large(nn.Module):
    """A parameter of many slots beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 700)
        self.second = nn.Linear(700, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.relu(self.first(x))))


class Odd(nn.Module):
    """Parameters without dimensions, with one element, and without any."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.full((1, 1), 0.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x * self.scalar) + self.empty.sum()
        return x * self.single if float(self.scalar.detach()) > 0 else x


class Embeddings(nn.Module):
    """Padding, bags, and gradients scaled by frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Embedding(101, WIDTH, padding_idx=5)
        self.scaled = nn.Embedding(101, WIDTH, scale_grad_by_freq=True)
        self.bag = nn.EmbeddingBag(101, WIDTH, mode="sum")
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.where(x < 30, 5, x)
        return self.bilinear(
            self.padded(x) + self.scaled(x), self.bag(x)[:, None].expand(-1, 12, -1)
        )


class Recurrent(nn.Module):
    """RNNs keep a list of their weights beside the parameters, and may flatten it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(48, WIDTH, batch_first=True)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lstm.flatten_parameters()
        x, _ = self.gru(self.lstm(x)[0])
        state = torch.zeros_like(x[:, 0])
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
        return state


class Attention(nn.Module):
    """torch's own attention modules, which use their children's weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True),
            num_layers=2,
            enable_nested_tensor=True,
        )
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 64, batch_first=True, norm_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.decoder(x, self.encoder(x))
        return self.cross(x, x, x, need_weights=False)[0]


class Checkpointed(nn.Module):
    """Blocks computed again in backward, with dropout, nested if `nested`."""

    def __init__(self, reentrant: bool, nested: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dropout=0.1) for _ in range(4)])
        self.first = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant
        self.nested = nested

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self.nested:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            return x

        def pair(first: int) -> Callable[[torch.Tensor], torch.Tensor]:
            def run(x: torch.Tensor) -> torch.Tensor:
                x = checkpoint(self.blocks[first], x, use_reentrant=self.reentrant)
                return checkpoint(self.blocks[first + 1], x, use_reentrant=self.reentrant)

            return run

        for first in (0, 2):
            x = checkpoint(pair(first), x, use_reentrant=self.reentrant)
        return x


class Outside(nn.Module):
    """Its methods other than forward are called; children see nothing of the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()
        self.decoder = Block()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not called")


def outside_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.to(next(model.parameters()).dtype)
    return model.decoder(model.encode(x)).float().square().mean()


class Functional(nn.Module):
    """Functions that are given the parameters: functional_call and vmap over stacked ones."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.many = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        params = {name: 2 * p for name, p in self.one.named_parameters()}
        x = torch.func.functional_call(self.one, params, (x,))
        weights = torch.stack([each.weight for each in self.many])
        biases = torch.stack([each.bias for each in self.many])
        return torch.func.vmap(F.linear, in_dims=(None, 0, 0))(x, weights, biases).sum(0)


class InPlace(nn.Module):
    """Activations that are changed in place, and views of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Linear(WIDTH, 3 * WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.rand(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.joined(x).chunk(3, dim=-1)
        first, second, third = self.scale
        x = self.relu(a * first).clone()
        x.add_(b * second).sigmoid_()
        return x * F.linear(c * third, self.joined.weight[:WIDTH])


def images(where: Where) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=where.generator())


def token_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    scores = model(batch)
    return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def routed_batch(where: Where) -> tuple[torch.Tensor, int]:
    return vectors(where), where.step * 2 + where.micro + where.rank


def structured_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(inputs={"x": x})
    scaled, (b, _) = out.extra["scaled"]
    return (out.hidden + scaled - b).float().square().mean()


_CASES = [
    Case("tied-head", TiedHead, tokens, token_loss),
    Case("borrowed-head", BorrowedHead, tokens, token_loss),
    Case("recursive", Recursive, vectors, mean_square),
    Case("returned-bias", ReturnedBias, vectors, mean_square),
    Case("bare", Bare, vectors, mean_square),
    Case("routed", Routed, routed_batch, lambda m, b: m(*b).float().square().mean()),
    Case("frozen", Frozen, vectors, mean_square),
    Case("batch-norm", Normed, images, mean_square, dtypes=("fp32",)),
    Case("convolutions", Convolutions, images, lambda m, b: (m(b).float() - 0.5).abs().mean()),
    Case("structured", Structured, vectors, structured_loss),
    Case("large", Large, vectors, lambda m, b: (m(b).float() - 1).abs().mean()),
    Case("odd", Odd, vectors, mean_square),
    Case("embeddings", Embeddings, tokens, mean_square),
    Case("recurrent", Recurrent, vectors, mean_square),
    Case("attention", Attention, vectors, mean_square),
    Case("checkpoint", lambda: Checkpointed(False), vectors, mean_square),
    Case("checkpoint-reentrant", lambda: Checkpointed(True), vectors, mean_square),
    Case("checkpoint-nested", lambda: Checkpointed(False, True), vectors, mean_square),
    Case(
        "checkpoint-nested-reentrant",
        lambda: Checkpointed(True, True),
        vectors,
        mean_square,
    ),
    Case("other-methods", Outside, vectors, outside_loss),
    Case("functional", Functional, vectors, mean_square),
    Case("in-place", InPlace, vectors, mean_square),
]
CASES = [replace(case, make=ballasted(case.make)) for case in _CASES]
