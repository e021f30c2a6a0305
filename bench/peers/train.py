"""The same training with plain PyTorch, DDP, FSDP2 and DeepSpeed, measured as `hetero train` does.

usage: python -m bench.peers.train PEER WORKLOAD.json MODE [SWAP_FOLDER]

Prints one JSON object with the keys of `hetero train --json` as the last line on stdout. PEER and
its MODEs:

torch      everything in memory; bf16 keeps weights and moments in bf16 and has no master; autocast
           keeps fp32 weights and moments and computes in bf16; fp32
ddp        DistributedDataParallel: every rank holds all state and averages the gradients; as torch
fsdp2      FSDP2: sharded state; each block is gathered before its forward and backward. fp32 shards
           in RAM under CPUOffloadPolicy, which on a machine that computes on the CPU copies
           nothing; compute in bf16 (offload) or fp32, gradients reduced in fp32. Every rank builds
           the whole model before it is sharded, so that all contenders begin with the same weights
deepspeed  ZeRO-3 on the CPU with its state offloaded to RAM (cpu) or files (nvme, in SWAP_FOLDER).
           Needs `pip install deepspeed`, a compiler and, for nvme, libaio's header: DeepSpeed
           builds its operators at first use

ddp and fsdp2 run as one of several ranks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.peers.timing import kernel_bytes
from bench.peers.workload import Workload

# Of DeepSpeed's buffers for parameters: no tensor may be larger.
LEAST_BUFFER_NUMEL = 100_000_000
# Its asynchronous I/O, where state goes to files.
_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 16,
    "thread_count": 1,
    "single_submit": False,
    "overlap_events": True,
}


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
    """A model in a DeepSpeed engine, which is sharded as it is made."""

    modes = ("cpu", "nvme")
    dtype = "bf16"

    def __init__(self, workload: Workload, mode: str, swap_folder: str | None = None) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"  # which importing reads
        # By name, because type checking must not need it.
        deepspeed: Any = importlib.import_module("deepspeed")
        if "RANK" not in os.environ:  # a world of one, as its launcher would set it up
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = str(probe.getsockname()[1])
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        deepspeed.init_distributed("gloo")
        config = deepspeed_config(workload, mode, swap_folder)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = workload.make_model()
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=model, config=config, model_parameters=model.parameters()
        )
        self.params = sum(parameter.ds_numel for parameter in self._engine.module.parameters())
        self.policy = f"ZeRO-3 {mode}"
        self.versions: dict[str, str] = {"deepspeed": deepspeed.__version__}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._engine(input_ids=tokens, labels=tokens).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self, lr: float, last: bool) -> None:
        # The engine counts the micro-batches itself.
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()


def deepspeed_config(workload: Workload, mode: str, swap_folder: str | None) -> dict[str, Any]:
    """ZeRO-3 with parameters and optimizer state on the CPU or, pipelined, in files.

    Everything decays, in one parameter group: with two, the pipelined swapper of 0.19.8 runs out
    of its buffers and fails by an assertion.
    """
    optimizer_home: dict[str, Any] = {"device": "cpu", "pin_memory": False}
    param_home = optimizer_home
    if mode == "nvme":
        vocab_size = int(workload.model_config.get("vocab_size", 0))
        width = int(workload.model_config.get("n_embd", 0))
        numel = max(vocab_size * width, 4 * width * width) + (1 << 20)
        files = {"device": "nvme", "pin_memory": False, "nvme_path": swap_folder, "buffer_count": 5}
        optimizer_home = files | {"pipeline_read": True, "pipeline_write": True}
        param_home = files | {"buffer_size": max(LEAST_BUFFER_NUMEL, numel)}
    optimizer = {
        "lr": workload.lrs[0],
        "betas": list(workload.betas),
        "weight_decay": workload.weight_decay,
    }
    return {
        "train_micro_batch_size_per_gpu": workload.batch_size,
        "gradient_accumulation_steps": workload.accumulate,
        "gradient_clipping": workload.clip,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": optimizer_home,
            "offload_param": param_home,
        },
        "optimizer": {"type": "AdamW", "params": optimizer},
        "aio": _AIO,
    }


PEERS: dict[str, type[TorchPeer] | type[DeepSpeedPeer]] = {
    "torch": TorchPeer,
    "ddp": DdpPeer,
    "fsdp2": Fsdp2Peer,
    "deepspeed": DeepSpeedPeer,
}
PHASES = ("forward_s", "backward_s", "optimizer_s")


def measure(peer: TorchPeer | DeepSpeedPeer, workload: Workload) -> dict[str, Any]:
    """Trains and returns the figures under the keys of `hetero train --json`.

    All ranks must call it. Times and disk traffic are this rank's; losses are means over the ranks.
    Disk traffic is what the kernel counts for the process; the page cache is not in it. What ranks
    send each other, no peer can tell: null.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    process = psutil.Process()
    losses: list[float] = []
    times: dict[str, list[float]] = {key: [] for key in ("step_s", *PHASES)}
    disk: list[tuple[int, int]] = []
    for lr, micro_batches in zip(workload.lrs, workload.batches(rank), strict=True):
        before, begin_s = process.io_counters(), time.perf_counter()
        loss_sum, spent = 0.0, dict.fromkeys(PHASES, 0.0)
        for tokens in micro_batches:
            at = [time.perf_counter()]
            loss = peer.forward(tokens)
            loss_sum += loss.item()
            at.append(time.perf_counter())
            peer.backward(loss)
            at.append(time.perf_counter())
            peer.step(lr, last=tokens is micro_batches[-1])
            at.append(time.perf_counter())
            for phase, begin, end in zip(PHASES, at, at[1:], strict=False):
                spent[phase] += end - begin
        for name, seconds in {"step_s": time.perf_counter() - begin_s, **spent}.items():
            times[name].append(seconds)
        losses.append(loss_sum / len(micro_batches))
        after = process.io_counters()
        disk.append((after.read_bytes - before.read_bytes, after.write_bytes - before.write_bytes))
        told = f"step {len(losses)} loss {losses[-1]:.4f} {times['step_s'][-1]:.2f} s"
        print(told, file=sys.stderr, flush=True)
    peak = kernel_bytes("VmHWM")["VmHWM"]
    every_rank = _gathered([*losses, float(peak)])
    steady_s, steady_disk = times["step_s"][1:] or times["step_s"], disk[1:] or disk
    read, written = (sum(moved) / len(steady_disk) for moved in zip(*steady_disk, strict=True))
    exchanged = 0 if workload.ranks == 1 else None
    return {
        "ranks": workload.ranks,
        "steps": len(losses),
        "losses": every_rank[:, :-1].mean(0).tolist(),
        **times,
        "tokens_per_s": workload.tokens_per_step * len(steady_s) / sum(steady_s),
        "peak_rss_bytes": peak,
        "peak_rss_by_rank_bytes": every_rank[:, -1].long().tolist(),
        "bytes_per_step": {"disk_read": round(read), "disk_write": round(written)},
        **dict.fromkeys(("sent_bytes_per_step", "received_bytes_per_step"), exchanged),
        "gather_wait_s_per_step": exchanged,
        "threads": torch.get_num_threads(),
        "params": peer.params,
        "dtype": peer.dtype,
        "policy": peer.policy,
        "versions": {"torch": torch.__version__, **peer.versions},
    }


def _gathered(values: list[float]) -> torch.Tensor:
    """Every rank's `values`: float64[ranks, len(values)]."""
    mine = torch.tensor(values, dtype=torch.float64)
    if not dist.is_initialized():
        return mine[None]
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found)


@contextlib.contextmanager
def _joined() -> Iterator[None]:
    """Connected, over gloo, with the ranks that the environment names."""
    # Loaded by others later on, it would keep the connection in its functions' default arguments.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        gc.collect()  # modules of DDP and FSDP are in reference cycles
        dist.destroy_process_group()


def main(argv: list[str]) -> int:
    name, workload_path, mode, *swap_folder = argv
    if mode not in PEERS[name].modes:
        raise ValueError(f"mode must be one of {', '.join(PEERS[name].modes)}, got {mode!r}")
    workload = Workload.read(Path(workload_path))
    torch.set_num_threads(workload.threads)
    # (DeepSpeed joins its ranks by itself.)
    with _joined() if name in ("ddp", "fsdp2") else contextlib.nullcontext():
        try:
            result = measure(PEERS[name](workload, mode, *swap_folder), workload)
        except ModuleNotFoundError as error:
            result = {"status": "missing", "error": str(error)}
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Sharded tensors leave the connection's threads behind, which can abort the interpreter's end.
    sys.stdout.flush()
    os._exit(code)
