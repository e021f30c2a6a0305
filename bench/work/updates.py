"""hetero's update kernels and norms on memory of their own, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from bench.harness.rounds import Sample
from bench.peers.timing import timed_rate
from offload import _native
from offload._native import Arena, Hyper, UpdateKind
from offload.memory.sizes import round_up
from offload.profile.measure_cuda import TORCH_DTYPES

if TYPE_CHECKING:
    from offload._native import DtypeName, RuleName, StateDtypeName

RULES: tuple[RuleName, ...] = ("adam", "lion", "adagrad", "sgd", "muon", "muon_momentum")
STATE_DTYPES: tuple[StateDtypeName, ...] = ("fp32", "bf16", "8bit")
# Parameter and gradient: gradients as backward gives them, or accumulated in fp32.
DTYPES: tuple[tuple[DtypeName, DtypeName], ...] = (
    ("bf16", "bf16"),
    ("bf16", "fp32"),
    ("fp16", "fp16"),
    ("fp16", "fp32"),
    ("fp32", "fp32"),
)
NORM_DTYPES: tuple[DtypeName, ...] = ("bf16", "fp16", "fp32")

HUGE_PAGE_BYTES = 2 << 20
PARTS = ("param", "grad", "master", "state 0", "state 1")
TILE = 1 << 20  # elements that are drawn; arrays repeat them

_HYPERS = {
    "adam": Hyper(lr=1e-4, weight_decay=0.01, decoupled=True, step=10),
    "lion": Hyper(lr=1e-5, weight_decay=0.01, decoupled=True, step=10),
    "adagrad": Hyper(lr=1e-3, step=10),
    "sgd": Hyper(lr=1e-3, weight_decay=0.01, momentum=0.9, step=10),
    "muon": Hyper(lr=1e-3, weight_decay=0.01, decoupled=True, step=10),
    "muon_momentum": Hyper(lr=1e-3, momentum=0.95, nesterov=True, step=10),
}


@dataclass(frozen=True)
class Variant:
    """Something that goes through the arrays once: a name, its traffic and its sampler."""

    name: str
    bytes_per_param: float
    sample: Callable[[], Sample]  # {"params_per_s", "gbps", "bytes_per_param"}


class Updates:
    """Arrays of `numel` elements in one arena with huge pages, shared by all variants in turn.

    Every turn fills them first, because each variant reads the bytes as other dtypes, and numbers
    that are none would take other paths through the kernels than those of a training.
    """

    def __init__(self, numel: int, repeats: int) -> None:
        self.numel = numel
        self.repeats = repeats
        self._part_bytes = round_up(4 * numel, HUGE_PAGE_BYTES)
        self._arena = Arena(len(PARTS) * self._part_bytes)
        self._memory: torch.Tensor = torch.from_dlpack(  # type: ignore[attr-defined]
            self._arena.export(0, self._arena.nbytes)
        )
        generator = torch.Generator().manual_seed(0)
        tile = min(numel, TILE)
        self._weights = torch.randn(tile, generator=generator) * 0.02
        self._grads = torch.randn(tile, generator=generator) * 1e-3
        self._averages = torch.randn(tile, generator=generator) * 1e-3
        self._squares = torch.rand(tile, generator=generator) * 1e-6 + 1e-8
        self._remainders = torch.randint(-(1 << 15), 1 << 15, (tile,), generator=generator)

    @staticmethod
    def needed_bytes(numel: int) -> int:
        """Memory that the constructor takes."""
        return len(PARTS) * round_up(4 * numel, HUGE_PAGE_BYTES)

    def stream(self) -> Variant:
        """The yardstick: what memory gives to 4 reads and 3 writes of fp32 and nearly no work."""
        parts = ("param", "grad", "state 0", "state 1")

        def fill() -> None:
            for part in parts:
                self._put(part, torch.float32, self._grads)

        param, grad, exp_avg, exp_avg_sq = map(self._address, parts)
        stream = partial(_native.stream, param, grad, exp_avg, exp_avg_sq, self.numel)
        return self._variant("stream", 28, fill, stream)

    def updates(self) -> list[Variant]:
        """Every kernel, in every sensible combination of dtypes."""
        return [
            self.update(UpdateKind(dtype, grad_dtype, rule, state_dtype))
            for rule, (dtype, grad_dtype), state_dtype in product(RULES, DTYPES, STATE_DTYPES)
        ]

    def update(self, kind: UpdateKind) -> Variant:
        """E.g. "adam bf16/bf16, states fp32": parameter and gradient, then states."""
        name = f"{kind.rule} {kind.dtype}/{kind.grad_dtype}, states {kind.state_dtype}"
        moved = kind.bytes_moved(TILE) / TILE
        return self._variant(name, moved, partial(self.fill, kind), partial(self.run, kind))

    def norms(self) -> list[Variant]:
        """The sum of the squares of a gradient, of each dtype."""
        return [
            self._variant(
                f"sum_of_squares {dtype}",
                TORCH_DTYPES[dtype].itemsize,
                partial(self._put, "grad", TORCH_DTYPES[dtype], self._grads),
                partial(_native.sum_of_squares, dtype, self._address("grad"), self.numel),
            )
            for dtype in NORM_DTYPES
        ]

    def writes(self, source_dtype: DtypeName, dtype: DtypeName) -> list[Variant]:
        """A gradient is copied or added to where it is kept: by torch; by torch, and summed by a
        pass of its own; with its sum of squares on the way."""
        source = self.tensor("param", TORCH_DTYPES[source_dtype])
        kept = self.tensor("grad", TORCH_DTYPES[dtype])

        def fill() -> None:
            self._put("param", source.dtype, self._grads)
            self._put("grad", kept.dtype, self._grads)

        def variants(
            verb: str, torch_does: Callable[..., object], summed: Callable[..., float], reads: int
        ) -> list[Variant]:
            def then_sum() -> None:
                torch_does(kept, source)
                _native.sum_of_squares(dtype, kept.data_ptr(), self.numel)

            places = (source_dtype, source.data_ptr(), dtype, kept.data_ptr(), self.numel)
            moved = source.itemsize + reads * kept.itemsize
            return [
                self._variant(verb, moved, fill, partial(torch_does, kept, source)),
                self._variant(f"{verb}, then sum", moved + kept.itemsize, fill, then_sum),
                self._variant(f"{verb} and sum", moved, fill, partial(summed, *places)),
            ]

        return [
            *variants("copy", torch.Tensor.copy_, _native.copy_and_sum, 1),
            *variants("add", torch.Tensor.add_, _native.add_and_sum, 2),
        ]

    def _variant(
        self,
        name: str,
        bytes_per_param: float,
        fill: Callable[[], None],
        run: Callable[[], Any],
    ) -> Variant:
        def sample() -> Sample:
            fill()
            rate = timed_rate(run, self.numel, self.repeats)["params_per_s"]
            gbps = rate * bytes_per_param / 1e9
            return {"params_per_s": rate, "gbps": gbps, "bytes_per_param": bytes_per_param}

        return Variant(name, bytes_per_param, sample)

    def fill(self, kind: UpdateKind) -> None:
        """Numbers as in a training under way."""
        # Where parameters are, Muon's first pass writes directions.
        param_dtype = "bf16" if kind.rule == "muon_momentum" else kind.dtype
        self._put("param", TORCH_DTYPES[param_dtype], self._weights)
        self._put("grad", TORCH_DTYPES[kind.grad_dtype], self._grads)
        if kind.dtype == "bf16":
            self._put("master", torch.int16, self._remainders)
        elif kind.dtype == "fp16":
            self._put("master", torch.float32, self._weights)
        if kind.rule != "adagrad":
            self._put_state(kind, 0, self._averages)
        if kind.rule in ("adam", "adagrad"):
            self._put_state(kind, kind.states - 1, self._squares)

    def run(self, kind: UpdateKind) -> None:
        """One update of all elements."""
        _native.update(
            kind,
            self._address("param"),
            self._address("grad"),
            0 if kind.dtype == "fp32" else self._address("master"),
            [self._address(f"state {state}") for state in range(kind.states)],
            self.numel,
            _HYPERS[kind.rule],
        )

    def tensor(self, part: str, dtype: torch.dtype) -> torch.Tensor:
        """The first `numel` elements of a part."""
        begin = PARTS.index(part) * self._part_bytes
        return self._memory[begin : begin + self.numel * dtype.itemsize].view(dtype)

    def _put(self, part: str, dtype: torch.dtype, tile: torch.Tensor) -> None:
        """Fills the part with one `tile` after the other."""
        target, tile = self.tensor(part, dtype), tile.to(dtype)
        whole = target.numel() - target.numel() % tile.numel()
        target[:whole].view(-1, tile.numel()).copy_(tile.expand(whole // tile.numel(), -1))
        target[whole:].copy_(tile[: target.numel() - whole])

    def _put_state(self, kind: UpdateKind, state: int, tile: torch.Tensor) -> None:
        part = f"state {state}"
        if kind.state_dtype != "8bit":
            self._put(part, TORCH_DTYPES[kind.state_dtype], tile)
            return
        # (A tile is a multiple of state blocks.)
        for begin in range(0, self.numel, TILE):
            blocks = self._address(part) + kind.state_bytes(begin)
            numel = min(TILE, self.numel - begin)
            _native.encode_state(kind, state, tile.data_ptr(), blocks, numel)

    def state(self, kind: UpdateKind, state: int) -> torch.Tensor:
        """A copy of the first `numel` elements of a state, in fp32."""
        part = f"state {state}"
        if kind.state_dtype != "8bit":
            return self.tensor(part, TORCH_DTYPES[kind.state_dtype]).float()
        values = torch.empty(self.numel)
        _native.decode_state(kind, state, self._address(part), values.data_ptr(), self.numel)
        return values

    def _address(self, part: str) -> int:
        return self._arena.address + PARTS.index(part) * self._part_bytes
