"""Trains a model for some steps in a process that the operating system limits.

usage: python -m bench.largest_model.limited_train SPEC.json

Prints one JSON object on stdout. The specification is a Spec as JSON. The limit is set before torch
is imported, so it holds for all that the process does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Which bytes the operating system refuses beyond a limit.
LIMITS = {
    "data": resource.RLIMIT_DATA,  # writable private memory, untouched parts included
    "address": resource.RLIMIT_AS,  # all address space, files and untouched parts included
}

TILE_TOKENS = 32  # whose logits are in memory at a time

# Bytes a token, a column and a layer, of holes in the heap between what layers keep for backward:
# as measured (the C library's heap grows by so much with each layer; tensors alive do not).
HOLE_BYTES = 16

MARGIN_BYTES = 48 << 20  # for what is in no formula: fragments, and libraries' scratch memory


@dataclass(frozen=True)
class Spec:
    """What is trained, and within what.

    `rss_bytes` is for the whole process. `host_memory` is the engine's part of it; None: what the
    framework, as the process measures it, and outside_bytes() leave. `limits` are bytes by names
    of LIMITS.
    """

    model_config: dict[str, Any]  # of transformers, with "model_type"
    rss_bytes: int
    nvme_path: str
    host_memory: int | None = None
    limits: dict[str, int] = field(default_factory=dict)
    steps: int = 3
    seq_len: int = 128
    batch_size: int = 1
    checkpointing: bool = True
    dtype: str = "bf16"
    threads: int | None = None
    seed: int = 0

    def write(self, path: Path) -> None:
        """As the JSON that the program reads."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Spec:
        """What write() wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def outside_bytes(spec: Spec) -> int:
    """RAM that a GPT-2-like model takes beside the framework and what the engine manages.

    With t tokens a step, width w, L layers, vocabulary V, 2 bytes an element: what is kept per
    layer, 2tw where backward recomputes, with HOLE_BYTES; of the layer that is computed 34 tw
    elements and the attention's scores; logits of TILE_TOKENS, in bf16, fp32 and as log-softmax, 10
    bytes each; of all tokens the gradient of hidden states, in fp32, with what is summed to it; the
    gradient of a tile, and twice the largest matrix, which matrix products reorder. (The embedding
    is in tiles, none larger than that.)
    """
    config = spec.model_config
    width, layers = int(config["n_embd"]), int(config["n_layer"])
    vocabulary, heads = int(config["vocab_size"]), int(config["n_head"])
    tokens = spec.seq_len * spec.batch_size
    layer = 2 * 34 * tokens * width + 3 * 2 * heads * tokens * spec.seq_len
    kept = (2 + HOLE_BYTES) * tokens * width * layers if spec.checkpointing else layer * layers
    logits = 3 * 10 * min(TILE_TOKENS, tokens) * vocabulary
    states, matrix = 8 * tokens * width, 2 * 4 * width * width
    return kept + layer + logits + states + 4 * matrix


def main(argv: list[str]) -> int:
    spec = Spec.read(Path(argv[0]))
    for name, nbytes in spec.limits.items():
        resource.setrlimit(LIMITS[name], (nbytes, nbytes))
    print(json.dumps(run(spec)))
    return 0


def run(spec: Spec) -> dict[str, Any]:
    """Trains, and says what it took; "status" is "trained", "refused" or "failed"."""
    import torch

    from offload.errors import HeteroError
    from offload.memory.c_heap import trim_heap
    from offload.memory.process_memory import peak_resident_bytes, resident_bytes

    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    result: dict[str, Any] = {}
    try:
        warm = {**spec.model_config, "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 256}
        _train(dataclasses.replace(spec, model_config=warm, steps=1), 64 << 20)
        trim_heap()
        framework = resident_bytes()
        left = spec.rss_bytes - framework - outside_bytes(spec) - MARGIN_BYTES
        host = spec.host_memory or left
        result |= {"framework_bytes": framework, "host_memory": host}
        if host <= 0:
            result |= {"status": "refused", "error": f"the budget is {-host} bytes too small"}
        else:
            result |= {"status": "trained", "error": None, **_train(spec, host)}
    except HeteroError as error:
        result |= {"status": "refused", "error": f"{type(error).__name__}: {error}"}
    except (MemoryError, RuntimeError, OSError) as error:  # torch: DefaultCPUAllocator
        result |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    return {**result, "peak_rss_bytes": peak_resident_bytes(), "memory": memory_bytes()}


def _train(spec: Spec, host_memory: int) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import hetero
    from offload.memory.process_memory import peak_resident_bytes

    config = AutoConfig.for_model(**spec.model_config)
    config.use_cache = False
    torch.manual_seed(spec.seed)
    begin_s = time.perf_counter()
    with hetero.ZeroInitContext(
        placement_policy="nvme",
        host_memory=host_memory,
        nvme_path=spec.nvme_path,
        dtype=spec.dtype,
    ):
        model = AutoModelForCausalLM.from_config(config).train()
        # Neither the embedding, nor logits, nor their gradients are in memory whole.
        hetero.tile_embeddings(model, tile_tokens=TILE_TOKENS)
    if spec.checkpointing:
        model.gradient_checkpointing_enable()
    params = sum(p.numel() for p in model.parameters())
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-4))
    engine = optimizer.engine
    constructed_s = time.perf_counter() - begin_s
    constructed_peak = peak_resident_bytes()
    before = engine.traffic
    losses, seconds = [], []
    try:
        for _ in range(spec.steps):
            tokens = torch.randint(0, config.vocab_size, (spec.batch_size, spec.seq_len))
            begin_s = time.perf_counter()
            loss = model(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            optimizer.backward(loss)
            hetero.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin_s)
        engine.synchronize()
        after = engine.traffic
        moved = after.disk_read + after.disk_write - before.disk_read - before.disk_write
        return {
            "params": params,
            "losses": losses,
            "all_finite": all(map(math.isfinite, losses)),
            "constructed_s": constructed_s,
            "constructed_peak_rss_bytes": constructed_peak,
            "step_s": seconds,
            "peak_managed_bytes": dict(engine.ledger.peak_bytes),
            "nvme_bytes_per_step": moved // spec.steps,
            "threads": torch.get_num_threads(),
        }
    finally:
        engine.close()


def memory_bytes() -> dict[str, int]:
    """What Linux counts of this process: address space, private writable memory, resident, and how
    much of that is of files ("VmPeak", "VmData", "VmHWM", "VmRSS", "RssFile")."""
    names = ("VmPeak", "VmData", "VmHWM", "VmRSS", "RssFile")
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: int(found[name].split()[0]) * 1024 for name in names if name in found}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
