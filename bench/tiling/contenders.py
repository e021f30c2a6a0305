"""What is computed in one turn: a forward and a backward, in a process of its own.

usage: python -m bench.tiling.contenders PART NAME SIZES, as bench.tiling calls it; one JSON object.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hetero
from bench.peers.timing import kernel_bytes


@dataclass(frozen=True)
class Sizes:
    """Of all contenders. `tiles` are parts of a sequence or of a layer."""

    tokens: int = 4096
    vocabulary: int = 50257
    width: int = 1024
    tile_tokens: int | None = None
    tiles: int = 16
    dtype: str = "bf16"
    threads: int | None = None
    path: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    def ids(self) -> torch.Tensor:
        """Of one sequence."""
        return torch.randint(0, self.vocabulary, (1, self.tokens))


Step = Callable[[], object]


def _loss(tiled: bool, sizes: Sizes) -> Step:
    hidden = torch.randn(sizes.tokens, sizes.width, dtype=sizes.torch_dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width, dtype=sizes.torch_dtype) / 32)
    labels = sizes.ids().flatten()

    def whole() -> torch.Tensor:
        """As transformers computes it."""
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits.float().view(-1, sizes.vocabulary), labels)

    tiles = sizes.tile_tokens
    if tiled:
        return lambda: hetero.tiled_cross_entropy(
            hidden, weight, labels, tile_tokens=tiles
        ).backward()
    return lambda: whole().backward()


class _TiedModel(nn.Module):
    """An embedding, a norm, and a head of the embedding's weight."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.to(sizes.torch_dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.embedding(ids)))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), ids.flatten())


def _tied(tiled: bool, sizes: Sizes) -> Step:
    model, ids = _TiedModel(sizes), sizes.ids()
    if tiled:
        hetero.tile_heads(model, sizes.tile_tokens)
    return lambda: model(ids).backward()


def _mlp(tiled: bool, sizes: Sizes) -> Step:
    width = sizes.width
    inner = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    mlp = nn.Sequential(*inner).to(sizes.torch_dtype)
    if tiled:
        hetero.tile_sequence(mlp, sizes.tiles)
    x = torch.randn(1, sizes.tokens, width, dtype=sizes.torch_dtype, requires_grad=True)
    return lambda: mlp(x).sum().backward()


def _linear(tiled: bool, sizes: Sizes) -> Step:
    """A layer of hetero's with its state on NVMe, in the least RAM that works."""
    assert sizes.path is not None
    folder = tempfile.mkdtemp(dir=sizes.path)

    def build(host_memory: int) -> tuple[nn.Module, Any]:
        options = {"placement_policy": "nvme", "nvme_path": folder, "dtype": sizes.dtype}
        with hetero.ZeroInitContext(**options, host_memory=host_memory):
            model: nn.Module = nn.Sequential(
                hetero.TiledLinear(sizes.width, sizes.vocabulary, False, 1, sizes.tiles)
                if tiled
                else nn.Linear(sizes.width, sizes.vocabulary, bias=False)
            )
        return hetero.initialize(model, hetero.HybridAdam(model.parameters()))

    largest = sizes.width * -(-sizes.vocabulary // (sizes.tiles if tiled else 1)) * 4
    try:
        build(largest + (1 << 15))
        raise AssertionError("a budget of one parameter was enough")
    except hetero.PlacementError as error:
        host_memory = error.smallest_host_bytes
    gc.collect()
    model, optimizer = build(host_memory)
    x = torch.randn(64, sizes.width, requires_grad=True)

    def step() -> float:
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        optimizer.engine.synchronize()
        return float(host_memory)

    step()  # first steps measure the machine, and fill what is kept between steps
    return step


CONTENDERS: dict[str, dict[str, Callable[[Sizes], Step]]] = {
    part: {name: partial(make, name == "tiled") for name in (whole, "tiled")}
    for part, (whole, make) in {
        "loss": ("whole logits", _loss),
        "tied": ("plain", _tied),
        "mlp": ("plain", _mlp),
        "linear": ("plain", _linear),
    }.items()
}


def measure(make: Callable[[Sizes], Step], sizes: Sizes) -> dict[str, float]:
    """Seconds of a step, after a tiny one of warm-up, CPU seconds of all its threads, and how far
    the process grew in it, in bytes.

    Gradients of the parameters are made anew in the step, so they count.
    """
    if sizes.threads is not None:
        torch.set_num_threads(sizes.threads)
    torch.manual_seed(0)
    tiny = dataclasses.replace(sizes, tokens=16, vocabulary=256, width=64, tiles=2)
    for part in ("tied", "mlp"):  # what is imported when it is first used
        CONTENDERS[part]["tiled"](tiny)()
    step = make(sizes)
    before = kernel_bytes("status", "VmRSS")["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    host_memory = step()
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_s,
        "grown_bytes": float(kernel_bytes("status", "VmHWM")["VmHWM"] - before),
        **({"host_memory_bytes": host_memory} if isinstance(host_memory, float) else {}),
    }


def main(argv: list[str]) -> int:
    part, name, sizes = argv
    print(json.dumps(measure(CONTENDERS[part][name], Sizes(**json.loads(sizes)))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
