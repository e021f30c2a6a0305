"""A few steps of a GPT-2 in a process of its own, which may be limited: one way to train it.

usage: python -m bench.work.gpt_training SPEC.json

Prints one JSON object on stdout. The specification is a Spec as JSON. The limit is set before torch
is imported, so it holds for all that the process does; therefore nothing here imports it earlier.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.peers.timing import kernel_bytes

if TYPE_CHECKING:
    import torch

    from bench.work.gpt import Gpt

# hetero, or PyTorch in bf16 without a master, with some of these: each block a checkpoint; what
# autograd saves copied to the CPU (save_on_cpu); embeddings in tiles; the loss not in tiles. On a
# GPU also "fsdp2": fully_shard() on one rank, with fp32 in page-locked RAM, where AdamW is.
CONTENDERS = (
    "torch",
    "torch-oncpu",
    "torch-checkpoints",
    "torch-checkpoints-oncpu",
    "hetero",
    "hetero-tiles-checkpoints",
    "hetero-whole",
    "hetero-whole-checkpoints",
)
LR = 1e-4
TILE_TOKENS = 32  # of "tiles": whose logits are in memory at a time

# Which bytes the operating system refuses beyond a limit.
LIMITS = {
    "data": resource.RLIMIT_DATA,  # writable private memory, untouched parts included
    "address": resource.RLIMIT_AS,  # all address space, files and untouched parts included
}
# Limits count what is mapped and not touched, too: while a model is built its arenas are there
# whole, and its parameters still where they were. So a limit guards against what gets out of hand;
# what proves the budget is the peak of resident memory, which the kernel keeps.
LIMIT_PER_BUDGET = 2
# glibc would keep blocks of up to 32 MiB in heaps of several threads, where what is freed between
# others stays resident: parameters that leave RAM while a model is built, gradients.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}


@dataclass(frozen=True)
class Spec:
    """What is trained, how, and within what.

    Attributes:
        contender: one of CONTENDERS.
        shape: the fields of bench.work.gpt.Shape.
        vocabulary: rows of the embedding, which is the head's weight, too.
        options: of hetero.ZeroInitContext(), on a GPU of hetero.initialize(); others take none.
        limits: bytes by names of LIMITS.
        steps: in all.
        skip_steps: first steps that are in no median, and whose bytes do not count.
        device: "cpu" or "cuda".
        enough_s: seconds of steps after those, after which no more follow.
    """

    contender: str
    shape: dict[str, int]
    vocabulary: int
    options: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    steps: int = 2
    skip_steps: int = 1
    device: str = "cpu"
    enough_s: float = math.inf

    def write(self, path: Path) -> None:
        """As the JSON that the program reads."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def try_to_train(
    spec: Spec, folder: str, timeout_s: float, budget_bytes: int | None = None
) -> dict[str, Any]:
    """What run() says of it in a process of its own, and what run_trial() does.

    Args:
        spec: what is trained; limits and "nvme_path" are added here.
        folder: on NVMe, for what is swapped.
        timeout_s: after so many seconds the process is ended.
        budget_bytes: what the whole process may hold; the operating system refuses LIMIT_PER_BUDGET
            times as many, which guards the machine. None: no limit.
    """
    from bench.harness.ranks import run_trial
    from offload.memory.sizes import format_bytes

    options = {"dir": folder, "prefix": "trial-", "ignore_cleanup_errors": True}
    with tempfile.TemporaryDirectory(**options) as own:  # type: ignore[call-overload]
        limits = {} if budget_bytes is None else {"data": LIMIT_PER_BUDGET * budget_bytes}
        path = Path(own, "spec.json")
        more = {"nvme_path": own} if spec.contender.startswith("hetero") else {}
        replace(spec, limits=limits, options=spec.options | more).write(path)
        command = (sys.executable, "-m", "bench.work.gpt_training", str(path))
        found = run_trial(command, timeout_s, budget_bytes, MALLOC)
    peak = found["peak_bytes"]
    if found["status"] == "trained" and budget_bytes is not None and peak > budget_bytes:
        found |= {"status": "over", "error": f"{format_bytes(peak)} were resident"}
    return found


@dataclass(frozen=True)
class Training:
    """A model and how its steps are made. `traffic` gives bytes moved so far, by name."""

    model: torch.nn.Module
    optimizer: Any
    saving: Callable[[], AbstractContextManager[Any]] = nullcontext  # around forwards
    traffic: Callable[[], dict[str, int]] = dict
    engine: Any = None


def run(spec: Spec) -> dict[str, Any]:
    """Trains, and says what it took.

    "status" is "trained", "refused" (hetero says that a budget is too small) or "failed" (there was
    no memory); "error" says why. Other errors are raised.
    """
    result: dict[str, Any]
    try:
        result = {"status": "trained", "error": None, **_train(spec)}
    except Exception as error:
        words = str(error).lower()
        # By name, because importing hetero takes memory that plain PyTorch does not.
        if any(each.__name__ == "BudgetError" for each in type(error).__mro__):
            status = "refused"
        # torch: "DefaultCPUAllocator: can't allocate memory", "[enforce fail at alloc_cpu.cpp]"
        elif isinstance(error, MemoryError) or "alloc" in words or "not enough memory" in words:
            status = "failed"
        else:
            raise
        result = {"status": status, "error": f"{type(error).__name__}: {error}"}
    return {**result, "peak_bytes": memory_bytes()["VmHWM"]}


def _train(spec: Spec) -> dict[str, Any]:
    import torch

    begin_s = time.perf_counter()
    kind = spec.contender.partition("-")[0]
    training = {"hetero": _make_hetero, "torch": _make_torch, "fsdp2": _make_fsdp2}[kind](spec)
    made_s = time.perf_counter() - begin_s
    if spec.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before_bytes = memory_bytes()["VmRSS"]
    size = (spec.shape["batch_size"], spec.shape["seq_len"])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, spec.vocabulary, size, generator=generator).to(spec.device)
    wait = torch.get_device_module(spec.device).synchronize
    losses: list[torch.Tensor] = []
    steps_s: list[float] = []
    before: dict[str, int] = {}
    engine = training.engine
    try:
        for number in range(spec.steps):
            wait()
            if number == spec.skip_steps:
                before = training.traffic()
            if sum(steps_s[spec.skip_steps :]) > spec.enough_s:
                break
            begin_s = time.perf_counter()
            with training.saving():
                loss = training.model(tokens)
            losses.append(loss.detach())
            loss.backward()
            del loss
            training.optimizer.step()
            training.optimizer.zero_grad()
            wait()
            steps_s.append(time.perf_counter() - begin_s)
            # So that a try which is ended says on stderr how far it came.
            print(f"step {number + 1}: {steps_s[-1]:.2f} s", file=sys.stderr, flush=True)
        moved, steps = training.traffic(), max(1, len(steps_s) - spec.skip_steps)
        on_device = torch.cuda.max_memory_allocated() if spec.device == "cuda" else None
        return {
            "losses": [float(loss) for loss in losses],
            "steps_s": steps_s,
            "step_s": median(steps_s[min(spec.skip_steps, len(steps_s) - 1) :]),
            "device_peak_bytes": on_device,
            "rss_bytes": memory_bytes()["VmRSS"],
            "before_bytes": before_bytes,
            "made_s": made_s,
            "bytes_per_step": {name: (moved[name] - before.get(name, 0)) / steps for name in moved},
            "params": sum(parameter.numel() for parameter in training.model.parameters()),
            "peak_managed_bytes": {} if engine is None else dict(engine.ledger.peak_bytes),
            "explained": "" if engine is None else engine.explain(),
        }
    finally:
        if engine is not None:
            engine.close()


def _make_torch(spec: Spec) -> Training:
    """Weights, gradients and moments in bf16, without a master."""
    import torch
    from torch.autograd.graph import save_on_cpu

    from bench.work.gpt import checkpoint_blocks

    before = torch.get_default_dtype()
    # Made in bf16 at once, so that the peak of memory is that of training.
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = _gpt(spec)
    finally:
        torch.set_default_dtype(before)
    if "checkpoints" in spec.contender:
        checkpoint_blocks(model)
    model.to(spec.device)
    # Fused, it makes no temporary tensors, and is several times as fast as one that is not.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Training(model, optimizer, save_on_cpu if "oncpu" in spec.contender else nullcontext)


def _make_fsdp2(spec: Spec) -> Training:
    """Computes in bf16, on a GPU."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("cuda:nccl,cpu:gloo", store=store, rank=0, world_size=1)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    model = _gpt(spec)
    model.places = model.places.to(spec.device)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))


def _make_hetero(spec: Spec) -> Training:
    """With the loss in tiles, unless its name says that it is whole."""
    import hetero
    from bench.work.gpt import checkpoint_blocks

    late = spec.options if spec.device == "cuda" else {}
    early: AbstractContextManager[Any] = nullcontext()
    if not late:
        early = hetero.ZeroInitContext(**spec.options)
    with early:
        model = _gpt(spec)
        if "tiles" in spec.contender:  # no weight, logits or gradient of them is whole in memory
            hetero.tile_embeddings(model, tile_tokens=TILE_TOKENS)
        if "checkpoints" in spec.contender:
            checkpoint_blocks(model)
    if spec.contender == "hetero":
        hetero.tile_heads(model)
    optimizer: Any = hetero.HybridAdam(model.parameters(), lr=LR)
    managed, optimizer = hetero.initialize(model, optimizer, **late)
    engine = optimizer.engine
    return Training(managed, optimizer, nullcontext, lambda: asdict(engine.traffic), engine)


def memory_bytes() -> dict[str, int]:
    """What Linux counts of this process: address space, private writable memory, resident, and how
    much of that is of files ("VmPeak", "VmData", "VmHWM", "VmRSS", "RssFile")."""
    return kernel_bytes("VmPeak", "VmData", "VmHWM", "VmRSS", "RssFile")


def _gpt(spec: Spec) -> Gpt:
    from bench.work.gpt import Gpt, Shape, fill, quick_init

    with quick_init():
        model = Gpt(Shape(**spec.shape), spec.vocabulary)
    fill(model)
    return model


def main(argv: list[str]) -> int:
    spec = Spec(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    for name, nbytes in spec.limits.items():
        resource.setrlimit(LIMITS[name], (nbytes, nbytes))
    print(json.dumps(run(spec)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
