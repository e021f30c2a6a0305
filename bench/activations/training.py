"""A few steps of a GPT-2 in a process that the operating system limits: one way to train it.

usage: python -m bench.activations.training SPEC.json

Prints one JSON object on stdout. The specification is a Spec as JSON. The limit is set before torch
is imported, so it holds for all that the process does. It runs without hetero, too, in a Python
that has DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.peers.timing import kernel_bytes

if TYPE_CHECKING:
    import torch

    from bench.work.gpt import Gpt

CONTENDERS = {
    "torch": "PyTorch, all kept",
    "torch-on-cpu": "PyTorch, save_on_cpu()",
    "torch-checkpoints": "PyTorch, each block a checkpoint",
    "torch-checkpoints-tiled-loss": "PyTorch, each block a checkpoint, hetero's tiled loss",
    "torch-checkpoints-on-cpu": "PyTorch, each block a checkpoint, save_on_cpu()",
    "hetero": "hetero",
    "hetero-tiles-checkpoints": "hetero, embeddings in tiles, each block a checkpoint",
    "hetero-whole-loss": "hetero, the loss not in tiles",
    "hetero-whole-loss-checkpoints": "hetero, the loss not in tiles, each block a checkpoint",
    "deepspeed": "DeepSpeed ZeRO-3 on NVMe, cpu_checkpointing",
}
LR = 1e-4
TILE_TOKENS = 32  # of hetero-tiles: whose logits are in memory at a time

# Which bytes the operating system refuses beyond a limit.
LIMITS = {
    "data": resource.RLIMIT_DATA,  # writable private memory, untouched parts included
    "address": resource.RLIMIT_AS,  # all address space, files and untouched parts included
}


@dataclass(frozen=True)
class Spec:
    """What is trained, how, and within what.

    Attributes:
        contender: one of CONTENDERS.
        shape: the fields of bench.work.gpt.Shape; `batch_size` is that of a whole step.
        vocabulary: rows of the embedding, which is the head's weight, too.
        options: of hetero.ZeroInitContext(); others take "nvme_path" alone.
        limits: bytes by names of LIMITS.
        micro_batches: equal parts of the batch, each with a forward and a backward of its own.
        steps: in all.
        skip_steps: first steps that are in no median, and whose bytes do not count.
    """

    contender: str
    shape: dict[str, int]
    vocabulary: int
    options: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    micro_batches: int = 1
    steps: int = 2
    skip_steps: int = 1

    def write(self, path: Path) -> None:
        """As the JSON that the program reads."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Spec:
        """What write() wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.shape["seq_len"] * self.shape["batch_size"]


@dataclass(frozen=True)
class Training:
    """A model and how its steps are made. `traffic` gives bytes moved so far, by name."""

    model: torch.nn.Module
    backward: Callable[[torch.Tensor], object]
    update: Callable[[], object]  # makes the gradients zero, too
    saving: Callable[[], AbstractContextManager[Any]] = nullcontext  # around forwards
    traffic: Callable[[], dict[str, int]] = dict
    peak_managed_bytes: Callable[[], dict[str, int]] = dict  # by tier
    explain: Callable[[], str] = str  # what the steps were like, and why
    close: Callable[[], object] = lambda: None


def main(argv: list[str]) -> int:
    spec = Spec.read(Path(argv[0]))
    for name, nbytes in spec.limits.items():
        resource.setrlimit(LIMITS[name], (nbytes, nbytes))
    print(json.dumps(run(spec)))
    return 0


def run(spec: Spec) -> dict[str, Any]:
    """Trains, and says what it took.

    "status" is "trained", "refused" (hetero says that a budget is too small), "failed" (there was
    no memory) or "missing" (DeepSpeed is not installed); "error" says why. Other errors are raised.
    """
    result: dict[str, Any]
    try:
        result = {"status": "trained", "error": None, **_train(spec)}
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        result = {"status": status, "error": f"{type(error).__name__}: {error}"}
    memory = memory_bytes()
    return {**result, "peak_bytes": memory["VmHWM"], "memory": memory}


def _status(error: Exception) -> str | None:
    """What an error says of the try; None for one that says nothing of memory."""
    # By name, because there may be no hetero here.
    if any(each.__name__ == "BudgetError" for each in type(error).__mro__):
        return "refused"
    if isinstance(error, ModuleNotFoundError):
        return "missing"
    # torch: "DefaultCPUAllocator: can't allocate memory", "[enforce fail at alloc_cpu.cpp]"
    words = str(error).lower()
    if isinstance(error, MemoryError) or "alloc" in words or "not enough memory" in words:
        return "failed"
    return None


def _train(spec: Spec) -> dict[str, Any]:
    import torch

    made_s = time.perf_counter()
    training = _MAKERS[spec.contender](spec)
    made_s = time.perf_counter() - made_s
    before_bytes = memory_bytes()["VmRSS"]
    seq_len, batch_size = spec.shape["seq_len"], spec.shape["batch_size"]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, spec.vocabulary, (batch_size, seq_len), generator=generator)
    losses: list[float] = []
    seconds: list[float] = []
    forward_s: list[float] = []
    before: dict[str, int] = {}
    try:
        for number in range(spec.steps):
            if number == spec.skip_steps:
                before = training.traffic()
            begin_s, in_forward_s, loss_sum = time.perf_counter(), 0.0, 0.0
            for micro_batch in tokens.chunk(spec.micro_batches):
                start_s = time.perf_counter()
                with training.saving():
                    loss = training.model(micro_batch) / spec.micro_batches
                loss_sum += loss.item()
                in_forward_s += time.perf_counter() - start_s
                training.backward(loss)
                del loss
            training.update()
            seconds.append(time.perf_counter() - begin_s)
            forward_s.append(in_forward_s)
            losses.append(loss_sum)
            # So that a try which is ended says on stderr how far it came.
            print(f"step {number + 1}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
        moved = training.traffic()
        counted = slice(min(spec.skip_steps, spec.steps - 1), None)
        steps = max(1, spec.steps - spec.skip_steps)
        return {
            "losses": losses,
            "steps_s": seconds,
            "step_s": median(seconds[counted]),
            "forward_s": median(forward_s[counted]),
            "before_bytes": before_bytes,
            "made_s": made_s,
            "bytes_per_step": {name: (moved[name] - before.get(name, 0)) / steps for name in moved},
            "params": sum(parameter.numel() for parameter in training.model.parameters()),
            "peak_managed_bytes": training.peak_managed_bytes(),
            "explained": training.explain(),
            "threads": torch.get_num_threads(),
        }
    finally:
        training.close()


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
    if spec.contender.endswith("tiled-loss"):
        import hetero

        hetero.tile_heads(model)
    # Fused, it makes no temporary tensors, and is several times as fast as one that is not.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    saving = save_on_cpu if spec.contender.endswith("on-cpu") else nullcontext
    return Training(model, lambda loss: loss.backward(), update, saving)


def _make_hetero(spec: Spec) -> Training:
    """With the loss in tiles, unless its name says that it is whole."""
    import hetero
    from bench.work.gpt import checkpoint_blocks

    with hetero.ZeroInitContext(**spec.options):
        model = _gpt(spec)
        if "-tiles" in spec.contender:  # no weight, logits or gradient of them is whole in memory
            hetero.tile_embeddings(model, tile_tokens=TILE_TOKENS)
        if spec.contender.endswith("checkpoints"):
            checkpoint_blocks(model)
    if "-" not in spec.contender:
        hetero.tile_heads(model)
    optimizer: Any = hetero.HybridAdam(model.parameters(), lr=LR)
    managed, optimizer = hetero.initialize(model, optimizer)
    engine = optimizer.engine

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(
        managed,
        lambda loss: loss.backward(),
        update,
        traffic=lambda: dataclasses.asdict(engine.traffic),
        peak_managed_bytes=lambda: dict(engine.ledger.peak_bytes),
        explain=engine.explain,
        close=engine.close,
    )


def _make_deepspeed(spec: Spec) -> Training:
    """ZeRO-3 on the CPU, parameters and optimizer on NVMe, checkpoints copied by DeepSpeed."""
    if spec.micro_batches != 1:
        raise ValueError(f"DeepSpeed takes the batch whole here, not {spec.micro_batches} parts")
    from bench.peers.world import deepspeed_engine, start_deepspeed, zero3_config
    from bench.work.gpt import Gpt, Shape, checkpoint_blocks

    deepspeed, shape = start_deepspeed(), Shape(**spec.shape)
    # As what bench.train runs: pipelined, with buffers no larger than the largest tensor.
    rows = max(spec.vocabulary, shape.seq_len, 4 * shape.width)
    numel = rows * shape.width + (1 << 20)
    config = zero3_config({"lr": LR}, shape.batch_size, spec.options["nvme_path"], numel)
    config["activation_checkpointing"] = {"cpu_checkpointing": True}
    checkpointing = deepspeed.checkpointing
    checkpointing.configure(
        None, partition_activations=False, checkpoint_in_cpu=True, num_checkpoints=shape.layers
    )

    engine, _ = deepspeed_engine(
        deepspeed,
        config,
        lambda: Gpt(shape, spec.vocabulary),
        lambda model: checkpoint_blocks(model, checkpointing.checkpoint),
    )
    return Training(engine, engine.backward, engine.step)


def memory_bytes() -> dict[str, int]:
    """What Linux counts of this process: address space, private writable memory, resident, and how
    much of that is of files ("VmPeak", "VmData", "VmHWM", "VmRSS", "RssFile")."""
    return kernel_bytes("status", "VmPeak", "VmData", "VmHWM", "VmRSS", "RssFile")


def _gpt(spec: Spec) -> Gpt:
    from bench.work.gpt import Gpt, Shape, fill, quick_init

    with quick_init():
        model = Gpt(Shape(**spec.shape), spec.vocabulary)
    fill(model)
    return model


_MAKERS: Mapping[str, Callable[[Spec], Training]] = {
    name: {"hetero": _make_hetero, "deepspeed": _make_deepspeed, "torch": _make_torch}[
        name.partition("-")[0]
    ]
    for name in CONTENDERS
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
