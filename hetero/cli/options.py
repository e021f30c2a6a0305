"""The options of `hetero finetune` and `hetero plan`: those of `hetero train`, and their own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero.job.options import (
    DEFAULT_DISK_SHARE,
    DEFAULT_SHARE,
    DTYPES,
    GROUPS,
    TrainOptions,
    option,
)
from hetero.planning.profiles import shipped_profiles
from offload.profile.machine_profile import default_path

_FORMATS = ("auto", "alpaca", "sharegpt", "messages", "text")
_OF_STATE = f"for model state (default: {DEFAULT_SHARE:.0%}% of what there is)"
GROUPS["output"] = ("fine-tuning", None)
GROUPS["ranks"] = ("machines", None)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainOptions):
    """The options of `hetero finetune`; raises ValueError for values that make no sense."""

    # The folder and the epochs say the first three, TRL does without the rest.
    LEFT_OUT = "config vocab_size steps save_model commit_every timeline"

    model: str = option(
        "folder of a causal language model with its tokenizer, as save_pretrained() writes it", ""
    )
    data: str | None = option(
        "file (.json, .jsonl, .parquet, .txt) or folder of such: conversations, or texts",
        metavar="PATH",
    )
    dtype: str | None = option(
        "dtype of parameters and gradients: bf16 or fp32; the optimizer's master weights are fp32"
        " in any case (default: bf16 where the hardware has it, else fp32)",
        choices=DTYPES,
    )
    seq_len: int = option(
        "tokens that a conversation is cut to, and that a packed sequence has", 512, least=2
    )
    batch_size: int = option("sequences per micro-batch, on each rank", 1, least=1)
    lr: float = option("peak learning rate", 1e-4)
    warmup: int = option("steps in which the learning rate rises to its peak", 0)  # as TRL
    weight_decay: float = option(
        "of matrices, not of biases and norms; decoupled, but for adagrad and sgd", 0.0
    )
    output: str = option(
        "new folder for the result, the model or the adapter, which from_pretrained() reads; with"
        " --resume an earlier result is replaced",
        "",
        metavar="DIR",
    )
    format: str = option(
        "what a record of --data is, or auto, by its keys", "auto", choices=_FORMATS
    )
    chat_template: str | None = option(
        "file with a Jinja chat template instead of the tokenizer's; or default, a plain one, which"
        " is also taken where the tokenizer has none",
        metavar="FILE",
    )
    packing: bool = option("put several records, each by itself, into one sequence", False)
    epochs: float = option("how often each record is seen", 1.0)
    max_steps: int | None = option("optimizer steps, instead of --epochs", least=1)
    eval_data: str | None = option("records to evaluate on, as --data", metavar="PATH")
    eval_steps: int | None = option("steps between evaluations (default: an epoch)", least=1)
    early_stopping_patience: int | None = option(
        "end after this number of evaluations without a lower loss, and write the best model",
        least=1,
    )
    report_to: str = option("tensorboard, wandb, or both with a comma: what gets metrics", "none")
    lora_rank: int = option("train a LoRA adapter of this rank, or 0: the model", 0, least=0)
    lora_alpha: int | None = option(
        "the adapter's product counts by this over its rank (default: twice the rank)", least=1
    )
    lora_dropout: float = option("dropout before the adapter, in [0, 1)", 0.0)
    lora_target_modules: str | None = option(
        "layers with an adapter, like q_proj,v_proj (default: all linear ones but the head)"
    )
    merge: bool = option("write the whole model with its adapter merged, not the adapter", False)

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

    @property
    def keeps_state(self) -> bool:
        """Whether the run saves."""
        return self.save_every is not None or self.early_stopping_patience is not None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(TrainOptions):
    """The options of `hetero plan`; raises ValueError for values that make no sense."""

    LEFT_OUT = (
        "data recompute allow_ram_filesystem tiled_loss backend threads prefetch verify_reads"
        " io_engine link_gbps steps lr warmup schedule weight_decay clip seed run_dir save_every"
        " save_model commit_every keep resume timeline live log_every"
    )

    vocab_size: int | None = option("of a model by name (default: as published)")
    host_memory: str | None = option(f"RAM, {_OF_STATE}", metavar="BYTES")
    device_memory: str | None = option(
        f"memory of a device, where the profile has one that is not RAM, {_OF_STATE}",
        metavar="BYTES",
    )
    nvme_path: tuple[str, ...] = option(
        "folder on NVMe, once per disk; with --profile it need not exist (default: none)",
        (),
        metavar="DIR",
    )
    nvme_capacity: str | None = option(
        f"file space there (default: {DEFAULT_DISK_SHARE:.0%}% of what is free)",
        metavar="BYTES",
        advanced=True,
    )
    dtype: str | None = option("bf16, fp16 or fp32", "bf16", choices=DTYPES)
    clip: float = option("predictions leave clipping out", 0.0)
    ranks: int = option("ranks in all", 1, least=1)
    nodes: int = option("machines, with as many ranks each", 1, least=1)
    lora_rank: int = option(
        "a LoRA adapter of this rank on all linear layers but the head is trained, and the rest is"
        " frozen, as `hetero finetune` does it; 0: all is trained",
        0,
        least=0,
    )
    profile: str | None = option(
        "another machine: a profile's file, or a name of those that come along, which are"
        f" {', '.join(shipped_profiles())}; list says what they are (default: {default_path()})",
        metavar="FILE",
    )
    what_if: bool = option(
        "also predict the step with other budgets of RAM and of the device, from the smallest that"
        " works to all state, and with faster and slower NVMe",
        False,
    )
