"""DeepSpeed's ZeRO-3 on the CPU, parameters and optimizer on NVMe, checkpoints copied by it."""

from __future__ import annotations

from typing import Any

from bench.peers.deepspeed_world import start_world, zero3_config
from bench.work.gpt import Gpt, Shape, checkpoint_blocks


def make_engine(shape: dict[str, int], vocabulary: int, swap_folder: str, lr: float) -> Any:
    """Its engine for a GPT-2 whose blocks are checkpoints of DeepSpeed's.

    Raises ModuleNotFoundError where DeepSpeed is not installed.
    """
    # Inside zero.Init, which replaces torch.Tensor.__new__, this import would fail.
    import torch._dynamo  # noqa: F401

    deepspeed = start_world()
    config = deepspeed_config(shape, vocabulary, swap_folder, lr)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Gpt(Shape(**shape), vocabulary)
    deepspeed.checkpointing.configure(
        None,
        partition_activations=False,
        checkpoint_in_cpu=True,
        num_checkpoints=shape["layers"],
    )
    checkpoint_blocks(model, deepspeed.checkpointing.checkpoint)
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    return engine


def deepspeed_config(
    shape: dict[str, int], vocabulary: int, swap_folder: str, lr: float
) -> dict[str, Any]:
    """As what bench.train runs: pipelined, with buffers no larger than the largest tensor."""
    rows = max(vocabulary, shape["seq_len"], 4 * shape["width"])
    numel = rows * shape["width"] + (1 << 20)
    return zero3_config({"lr": lr}, shape["batch_size"], swap_folder, numel) | {
        "activation_checkpointing": {"cpu_checkpointing": True}
    }
