"""What is computed in one turn: a forward and a backward, in a process of its own.

usage: python -m bench.tiling.contenders NAME SIZES, as bench.tiling calls it; one JSON object.
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

import psutil
import torch
from torch import nn
from torch.nn import functional as F

import hetero
from bench.tiling.grads_in_forward import loss_with_grads
from offload.memory.sizes import parse_bytes


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


Step = Callable[[], object]


def _ids(sizes: Sizes) -> torch.Tensor:
    return torch.randint(0, sizes.vocabulary, (1, sizes.tokens))


def _loss(sizes: Sizes, compute: Callable[..., torch.Tensor]) -> Step:
    hidden = torch.randn(sizes.tokens, sizes.width, dtype=sizes.torch_dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width, dtype=sizes.torch_dtype) / 32)
    labels = _ids(sizes).flatten()
    return lambda: compute(hidden, weight, labels).backward()


def _whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As transformers computes it."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float().view(-1, weight.shape[0]), labels)


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


def _tied(sizes: Sizes, tiled: bool) -> Step:
    model, ids = _TiedModel(sizes), _ids(sizes)
    if tiled:
        hetero.tile_heads(model, sizes.tile_tokens)
    return lambda: model(ids).backward()


def _mlp(sizes: Sizes, tiled: bool) -> Step:
    inner = (
        nn.Linear(sizes.width, 4 * sizes.width),
        nn.GELU(),
        nn.Linear(4 * sizes.width, sizes.width),
    )
    mlp = nn.Sequential(*inner).to(sizes.torch_dtype)
    if tiled:
        hetero.tile_sequence(mlp, sizes.tiles)
    x = torch.randn(1, sizes.tokens, sizes.width, dtype=sizes.torch_dtype, requires_grad=True)
    return lambda: mlp(x).sum().backward()


def _linear(sizes: Sizes, tiled: bool) -> Step:
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
    "loss": {
        "whole logits": lambda sizes: _loss(sizes, _whole),
        "tiled": lambda sizes: _loss(
            sizes, partial(hetero.tiled_cross_entropy, tile_tokens=sizes.tile_tokens)
        ),
        "gradients in forward": lambda sizes: _loss(
            sizes, partial(loss_with_grads, tile_tokens=sizes.tile_tokens, in_fp32=False)
        ),
        "gradients in forward, summed in fp32": lambda sizes: _loss(
            sizes, partial(loss_with_grads, tile_tokens=sizes.tile_tokens, in_fp32=True)
        ),
    },
    "tied": {
        "plain": lambda sizes: _tied(sizes, False),
        "tiled": lambda sizes: _tied(sizes, True),
    },
    "mlp": {
        "plain": lambda sizes: _mlp(sizes, False),
        "tiled": lambda sizes: _mlp(sizes, True),
    },
    "linear": {
        "plain": lambda sizes: _linear(sizes, False),
        "tiled": lambda sizes: _linear(sizes, True),
    },
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
    for parts in (CONTENDERS["tied"], CONTENDERS["mlp"]):  # what is imported when it is first used
        parts["tiled"](tiny)()
    step = make(sizes)
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    host_memory = step()
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    peak = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    )
    peak_bytes = parse_bytes(peak.split()[1] + "KiB")
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_s,
        "grown_bytes": float(peak_bytes - before),
        **({"host_memory_bytes": host_memory} if isinstance(host_memory, float) else {}),
    }


def main(argv: list[str]) -> int:
    part, name, sizes = argv
    print(json.dumps(measure(CONTENDERS[part][name], Sizes(**json.loads(sizes)))))
    return 0


def arguments(part: str, name: str, sizes: Sizes) -> list[str]:
    """The command line of this program, after the interpreter."""
    return ["-m", "bench.tiling.contenders", part, name, json.dumps(dataclasses.asdict(sizes))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
