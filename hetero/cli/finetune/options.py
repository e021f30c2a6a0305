"""The options of `hetero finetune`: those of `hetero train`, and what only fine-tuning has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero.job.options import GROUPS, TrainOptions, _option

_FORMATS = ("auto", "alpaca", "sharegpt", "messages", "text")
GROUPS["output"] = ("fine-tuning", None)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainOptions):
    """The options of `hetero finetune`; raises ValueError for values that make no sense."""

    output: str = _option(
        "new folder for the result, the model or the adapter, which from_pretrained() reads; with"
        " --resume an earlier result is replaced",
        "",
        metavar="DIR",
    )
    format: str = _option(
        "what a record of --data is, or auto, by its keys", "auto", choices=_FORMATS
    )
    chat_template: str | None = _option(
        "file with a Jinja chat template instead of the tokenizer's; or default, a plain one, which"
        " is also taken where the tokenizer has none",
        metavar="FILE",
    )
    packing: bool = _option("put several records, each by itself, into one sequence", False)
    epochs: float = _option("how often each record is seen", 1.0)
    max_steps: int | None = _option("optimizer steps, instead of --epochs", least=1)
    eval_data: str | None = _option("records to evaluate on, as --data", metavar="PATH")
    eval_steps: int | None = _option("steps between evaluations (default: an epoch)", least=1)
    early_stopping_patience: int | None = _option(
        "end after this number of evaluations without a lower loss, and write the best model",
        least=1,
    )
    report_to: str = _option("tensorboard, wandb, or both with a comma: what gets metrics", "none")
    lora_rank: int = _option("train a LoRA adapter of this rank, or 0: the model", 0, least=0)
    lora_alpha: int | None = _option(
        "the adapter's product counts by this over its rank (default: twice the rank)", least=1
    )
    lora_dropout: float = _option("dropout before the adapter, in [0, 1)", 0.0)
    lora_target_modules: str | None = _option(
        "layers with an adapter, like q_proj,v_proj (default: all linear ones but the head)"
    )
    merge: bool = _option("write the whole model with its adapter merged, not the adapter", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("epochs", math.isfinite(self.epochs) and self.epochs > 0, "more than 0")
        self._require("lora_dropout", 0 <= self.lora_dropout < 1, "in [0, 1)")
        self._require("dtype", self.dtype != "fp16", "bf16 or fp32")
        adapts = self.merge or self.lora_alpha or self.lora_dropout or self.lora_target_modules
        if self.lora_rank == 0 and adapts:
            raise ValueError(
                "--merge, --lora-alpha, --lora-dropout and --lora-target-modules are about an "
                "adapter; give --lora-rank, such as 16, or leave them out"
            )
        if self.eval_data is None and (self.eval_steps or self.early_stopping_patience):
            raise ValueError("--eval-data is missing; give the file or folder to evaluate on")
