"""What every contender has to do, written once as a file that each of them reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Workload:
    """Model, batches and optimizer of a training; `tokens_file` holds the batches as raw bytes."""

    model_config: dict[str, Any]  # of transformers, with "model_type"
    tokens_file: str  # uint8[len(lrs), accumulate, ranks, batch_size, seq_len]
    lrs: list[float]  # of every step
    accumulate: int  # micro-batches of a rank per step
    batch_size: int  # of a micro-batch
    seq_len: int
    betas: tuple[float, float]
    weight_decay: float  # decoupled
    clip: float  # 0 is none
    seed: int
    threads: int  # of a rank
    ranks: int = 1
    shard_ranks: int | None = None  # that share the model state; None: all

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks together."""
        return self.ranks * self.accumulate * self.batch_size * self.seq_len

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Workload:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def batches(self, rank: int = 0) -> Iterator[list[torch.Tensor]]:
        """The micro-batches of a rank in every step: int64[batch_size, seq_len] each."""
        raw = bytearray(Path(self.tokens_file).read_bytes())
        tokens = torch.frombuffer(raw, dtype=torch.uint8).view(
            len(self.lrs), self.accumulate, self.ranks, self.batch_size, self.seq_len
        )
        for step in tokens[:, :, rank]:
            yield [micro_batch.long() for micro_batch in step]

    def make_model(self) -> Any:
        """The transformers model in fp32, with the weights that all contenders begin with."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(self.seed)
        config = AutoConfig.for_model(**self.model_config)
        return AutoModelForCausalLM.from_config(config).train()
