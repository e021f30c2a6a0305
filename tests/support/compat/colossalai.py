"""ColossalAI's example of ZeRO with hetero's imports."""

from __future__ import annotations

from typing import Any

import torch

import hetero
from tests.support.compat.document import run_document

_COLOSSALAI = {
    "import colossalai": "from hetero.compat import colossalai",
    **{
        f"from {module} import {names}": f"from hetero.compat.{module} import {names}"
        for module, names in (
            ("colossalai.logging", "disable_existing_loggers, get_dist_logger"),
            ("colossalai.nn.optimizer", "HybridAdam"),
            ("colossalai.zero.init_ctx", "ZeroInitContext"),
            ("colossalai.zero.shard_utils", "TensorShardStrategy"),
            ("colossalai.zero.sharded_model", "ShardedModelV2"),
            ("colossalai.zero.sharded_optim", "ShardedOptimizerV2"),
        )
    },
}
_SIZES = {
    "    SEQ_LEN = 1024": "    SEQ_LEN = 16",
    "    VOCAB_SIZE = 50257": "    VOCAB_SIZE = 61",
    "    NUM_STEPS = 10": "    NUM_STEPS = 3",
    "    BATCH_SIZE = 8": "    BATCH_SIZE = 2",
}


def names_of() -> dict[str, Any]:
    """The names of the example, with small numbers where main() has those of a large model."""
    names = run_document(
        "colossalai_zero.txt",
        _COLOSSALAI | _SIZES,
        {"get_mem_info": lambda prefix="": prefix},
    )
    names["gpt2_medium"] = lambda checkpoint: names["GPTLMModel"](
        hidden_size=32,
        num_layers=2,
        num_attention_heads=2,
        max_seq_len=16,
        vocab_size=61,
        checkpoint=checkpoint,
    )
    return names


def train_on_a_rank(rank: int, world: int) -> list[torch.Tensor]:
    """The example on one of several ranks; the masters afterwards."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.manual_seed(rank)  # (the first rank's weights count)
    model, optimizer = names_of()["main"]()
    assert optimizer.engine.world.ranks == world
    found = hetero.masters(model.parameters())
    optimizer.engine.close()
    return found
