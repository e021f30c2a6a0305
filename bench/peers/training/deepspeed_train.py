"""DeepSpeed ZeRO-3 on the CPU with its state offloaded.

usage: python -m bench.peers.training.deepspeed_train WORKLOAD.json RESULT.json cpu|nvme SWAP_FOLDER

Needs `pip install deepspeed`, a compiler and, for nvme, libaio's header: DeepSpeed builds its
operators at first use.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from bench.peers.deepspeed_world import start_world, zero3_config
from bench.peers.serve import EXIT_MISSING
from bench.peers.training.measure import measure, write_result
from bench.peers.training.workload import Workload

# Of DeepSpeed's buffers for parameters: no tensor may be larger.
LEAST_BUFFER_NUMEL = 100_000_000


class DeepSpeedPeer:
    """A transformers model in a DeepSpeed engine, `engine`, one process."""

    def __init__(self, deepspeed: Any, workload: Workload, mode: str, swap_folder: Path) -> None:
        # Inside zero.Init, which replaces torch.Tensor.__new__, this import would fail, and
        # transformers makes it when it loads a model's module.
        import torch._dynamo
        from transformers import AutoModelForCausalLM

        config = deepspeed_config(workload, mode, swap_folder)
        torch.manual_seed(workload.seed)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = AutoModelForCausalLM.from_config(workload.make_model_config()).train()
        self.params = sum(parameter.ds_numel for parameter in model.parameters())
        self.engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model,
            config=config,
            model_parameters=model.parameters(),
        )
        self.version: str = deepspeed.__version__

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


def deepspeed_config(workload: Workload, mode: str, swap_folder: Path) -> dict[str, Any]:
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
    path = str(swap_folder) if mode == "nvme" else None
    return zero3_config(optimizer, workload.batch_size, path, buffer_numel) | {
        "gradient_accumulation_steps": workload.accumulate,
        "gradient_clipping": workload.clip,
    }


def main(argv: list[str]) -> int:
    workload_path, result_path, mode, swap_folder = argv
    if mode not in ("cpu", "nvme"):
        raise ValueError(f"mode must be cpu or nvme, got {mode!r}")
    workload = Workload.read(Path(workload_path))
    torch.set_num_threads(workload.threads)
    try:
        deepspeed = start_world()
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return EXIT_MISSING
    peer = DeepSpeedPeer(deepspeed, workload, mode, Path(swap_folder))
    result = measure(peer, workload)
    result |= {"params": peer.params, "dtype": "bf16", "policy": f"ZeRO-3 {mode}"}
    result["versions"] |= {"deepspeed": peer.version}
    write_result(Path(result_path), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
