"""The same training with plain PyTorch, DDP, FSDP2 and DeepSpeed.

usage: python -m bench.peers.train PEER WORKLOAD.json RESULT.json MODE [SWAP_FOLDER]

PEER and its MODEs:

torch      everything in memory; bf16 keeps weights and moments in bf16 and has no master; autocast
           keeps fp32 weights and moments and computes in bf16; fp32
ddp        DistributedDataParallel: every rank holds all state and averages the gradients; as torch
fsdp2      FSDP2: sharded state; each block is gathered before its forward and backward. fp32 shards
           in RAM under CPUOffloadPolicy, which on a machine that computes on the CPU copies
           nothing; compute in bf16 (offload) or fp32, gradients reduced in fp32. Every rank builds
           the whole model before it is sharded, so that all contenders begin with the same weights;
           a rank's training state is larger than that up to four ranks
deepspeed  ZeRO-3 on the CPU with its state offloaded to RAM (cpu) or files (nvme, in SWAP_FOLDER).
           Needs `pip install deepspeed`, a compiler and, for nvme, libaio's header: DeepSpeed
           builds its operators at first use

ddp and fsdp2 run as one of several ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.peers.measure import Peer, measure, write_result
from bench.peers.serve import EXIT_MISSING
from bench.peers.workload import Workload
from bench.peers.world import deepspeed_engine, joined, start_deepspeed, zero3_config

# Of DeepSpeed's buffers for parameters: no tensor may be larger.
LEAST_BUFFER_NUMEL = 100_000_000


class TorchPeer:
    """A model and torch's fused AdamW, for every micro-batch: forward(), backward(), step()."""

    modes: tuple[str, ...] = ("bf16", "autocast", "fp32")
    policy = "in memory"
    dtype: str  # as the result names it

    def __init__(self, workload: Workload, mode: str, swap_folder: str | None = None) -> None:
        self.dtype = mode
        self.model = self.wrapped(workload.make_model(), workload)
        self.params: int = sum(parameter.numel() for parameter in self.model.parameters())
        self.versions: dict[str, str] = {}
        self._clip, self._accumulate = workload.clip, workload.accumulate
        self._done = 0  # micro-batches of this step
        # Matrices decay; biases and norms do not.
        parameters = list(self.model.parameters())
        matrices = [p for p in parameters if p.ndim >= 2]
        others = [p for p in parameters if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": workload.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=workload.lrs[0],
            betas=workload.betas,
            fused=True,
        )

    def wrapped(self, model: Any, workload: Workload) -> Any:
        """The model as this peer has it: here with its weights in the mode's dtype."""
        return model.bfloat16() if self.dtype == "bf16" else model

    @property
    def exchanges(self) -> bool:
        """Whether this micro-batch is its step's last, in which ranks average gradients."""
        return self._done == self._accumulate - 1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == "autocast"):
            loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._accumulate).backward()

    def step(self, lr: float, last: bool) -> None:
        self._done += 1
        if not last:
            return
        self._done = 0
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self._clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


class DdpPeer(TorchPeer):
    """As TorchPeer, with the gradients' mean over the ranks."""

    policy = "in memory of every rank"

    def wrapped(self, model: Any, workload: Workload) -> Any:
        # Gradients in the buckets that are sent, not beside them.
        own = super().wrapped(model, workload)
        return DistributedDataParallel(own, gradient_as_bucket_view=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with self._exchange():
            return super().forward(tokens)

    def backward(self, loss: torch.Tensor) -> None:
        with self._exchange():
            super().backward(loss)

    def _exchange(self) -> contextlib.AbstractContextManager[None]:
        """Around what may send gradients."""
        if self.exchanges:
            return contextlib.nullcontext()
        no_sync: contextlib.AbstractContextManager[None] = self.model.no_sync()
        return no_sync


class Fsdp2Peer(TorchPeer):
    """The model sharded block by block, and torch's fused AdamW on the shards."""

    modes = ("offload", "fp32")
    policy = "fp32 shards, CPUOffloadPolicy"

    def wrapped(self, model: Any, workload: Workload) -> Any:
        self.dtype = "fp32" if self.dtype == "fp32" else "bf16"
        compute = torch.float32 if self.dtype == "fp32" else torch.bfloat16
        size, shard = dist.get_world_size(), workload.shard_ranks
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (size,) if shard is None else (size // shard, shard)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
            # Memory can be pinned only for an accelerator.
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
        lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
        for block in [block for each in lists for block in each]:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.model.set_requires_gradient_sync(self.exchanges)
        return super().forward(tokens)


class DeepSpeedPeer:
    """A model in a DeepSpeed engine, `engine`."""

    modes = ("cpu", "nvme")
    dtype = "bf16"

    def __init__(self, workload: Workload, mode: str, swap_folder: str | None = None) -> None:
        deepspeed = start_deepspeed()
        config = deepspeed_config(workload, mode, swap_folder)
        self.engine, self._optimizer = deepspeed_engine(deepspeed, config, workload.make_model)
        self.params = sum(parameter.ds_numel for parameter in self.engine.module.parameters())
        self.policy = f"ZeRO-3 {mode}"
        self.versions: dict[str, str] = {"deepspeed": deepspeed.__version__}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.engine(input_ids=tokens, labels=tokens).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self, lr: float, last: bool) -> None:
        # The engine counts the micro-batches itself.
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()


def deepspeed_config(workload: Workload, mode: str, swap_folder: str | None) -> dict[str, Any]:
    """ZeRO-3 with parameters and optimizer state on the CPU or, pipelined, in files.

    Everything decays, in one parameter group: with two, the pipelined swapper of 0.19.8 runs out
    of its buffers and fails by an assertion.
    """
    buffer_numel = None
    if mode == "nvme":
        vocab_size = int(workload.model_config.get("vocab_size", 0))
        width = int(workload.model_config.get("n_embd", 0))
        buffer_numel = max(vocab_size * width, 4 * width * width) + (1 << 20)
        buffer_numel = max(LEAST_BUFFER_NUMEL, buffer_numel)
    optimizer = {
        "lr": workload.lrs[0],
        "betas": list(workload.betas),
        "weight_decay": workload.weight_decay,
    }
    path = swap_folder if mode == "nvme" else None
    return zero3_config(optimizer, workload.batch_size, path, buffer_numel) | {
        "gradient_accumulation_steps": workload.accumulate,
        "gradient_clipping": workload.clip,
    }


PEERS: dict[str, type[TorchPeer] | type[DeepSpeedPeer]] = {
    "torch": TorchPeer,
    "ddp": DdpPeer,
    "fsdp2": Fsdp2Peer,
    "deepspeed": DeepSpeedPeer,
}


def run(name: str, workload: Workload, mode: str, swap_folder: str | None) -> dict[str, Any]:
    """The figures of a training."""
    made = PEERS[name](workload, mode, swap_folder)
    peer: Peer = made
    result = measure(peer, workload)
    result["versions"] |= made.versions
    return result | {"params": made.params, "dtype": made.dtype, "policy": made.policy}


def main(argv: list[str]) -> int:
    name, workload_path, result_path, mode, *swap_folder = argv
    if mode not in PEERS[name].modes:
        raise ValueError(f"mode must be one of {', '.join(PEERS[name].modes)}, got {mode!r}")
    workload = Workload.read(Path(workload_path))
    torch.set_num_threads(workload.threads)
    # (DeepSpeed joins its ranks by itself.)
    with joined() if name in ("ddp", "fsdp2") else contextlib.nullcontext():
        try:
            result = run(name, workload, mode, next(iter(swap_folder), None))
        except ModuleNotFoundError as error:
            print(error, file=sys.stderr)
            return EXIT_MISSING
        write_result(Path(result_path), result)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Sharded tensors leave the connection's threads behind, which can abort the interpreter's end.
    sys.stdout.flush()
    os._exit(code)
