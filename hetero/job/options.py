"""The options of `hetero train`, and of `hetero finetune` and `hetero plan`, which have theirs and
others: their defaults, their help, and what they may be."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hetero.overlap import OverlapUpdates
from hetero.planning.profiles import shipped_profiles
from offload.profile.machine_profile import default_path

DEFAULT_MODEL = "gpt2-medium"
# What a plan has without budgets, of RAM and of a device's memory: the rest is for all that is not
# managed.
DEFAULT_SHARE = 0.8
DEFAULT_DISK_SHARE = 0.95

Options = TypeVar("Options", bound="TrainOptions")

SCHEDULES = ("cosine", "constant")
OPTIMIZERS = ("adamw", "lion", "adagrad", "sgd")
STATE_DTYPES = ("fp32", "bf16", "8bit")
RECOMPUTE = ("auto", "none", "all")
POLICIES = ("auto", "cuda", "cpu", "nvme")
DTYPES = ("bf16", "fp16", "fp32")
IO_ENGINES = ("auto", "io_uring", "threads")
BACKENDS = ("auto", "cpu", "cuda", "emulated")
OVERLAPS = tuple(overlap.value for overlap in OverlapUpdates)
_FORMATS = ("auto", "alpaca", "sharegpt", "messages", "text")
_OF_STATE = f"for model state (default: {DEFAULT_SHARE:.0%}% of what there is)"

# Options whose flag is the Trainer's of Hugging Face.
_FLAGS = {
    "steps": "--max-steps",
    "accumulate": "--grad-accum",
    "clip": "--max-grad-norm",
    "profile": "--machine",
}
# Flags that TrainingArguments have, and that are understood, too; the help does not show them.
_TRAINER_FLAGS = {
    "batch_size": "--per-device-train-batch-size",
    "accumulate": "--gradient-accumulation-steps",
    "lr": "--learning-rate",
    "warmup": "--warmup-steps",
    "schedule": "--lr-scheduler-type",
    "epochs": "--num-train-epochs",
    "save_every": "--save-steps",
    "keep": "--save-total-limit",
    "log_every": "--logging-steps",
}

# Titles and descriptions of the groups that the help shows, by the first option of each.
GROUPS: dict[str, tuple[str, str | None]] = {
    "model": ("model and data", None),
    "policy": ("memory", None),
    "backend": ("speed", None),
    "steps": ("training", None),
    "run_dir": ("output", None),
    "output": ("fine-tuning", None),
    "ranks": ("machines", None),
}


def option(
    help: str,
    default: Any = None,
    *,
    least: int | None = None,
    advanced: bool = False,
    **arguments: Any,
) -> Any:
    """A field that is also a command-line option `--its-name`, with more arguments of argparse's.

    An `advanced` one is shown by --help-all alone.
    """
    about = {"help": help, "least": least, "advanced": advanced, "arguments": arguments}
    return field(default=default, metadata=about)


def _device(word: str) -> str:
    return {"gpu": "cuda"}.get(word, word)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `hetero train`; raises ValueError for values that make no sense.

    Byte amounts stay as the user wrote them ("4GiB" or a number); hetero.Config parses them. A
    command of more options is a class of its own, which may replace helps and defaults. LEFT_OUT
    names those of its base that it does not take.
    """

    LEFT_OUT: ClassVar[str] = ""

    model: str = option(
        "built-in shape: gpt2-100m, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-1.3b, opt-1.3b to"
        " opt-66b, llama-3-8b, llama-7b, llama-13b or llama-70b; or the config.json of a causal"
        " language model of Hugging Face, or its folder. Weights start at random",
        DEFAULT_MODEL,
    )
    vocab_size: int | None = option(
        "vocabulary of a built-in shape, at least 256 (default: 256, one token per byte value)"
    )
    data: str | None = option(
        "text file, or folder of text files (default: the source of Python's standard library)",
        metavar="PATH",
    )

    policy: str = option(
        "tiers that may hold the model state: auto, the fastest that the budgets allow; cuda (or"
        " gpu), all on the GPU; cpu, all in RAM; nvme, RAM and then NVMe",
        "auto",
        choices=POLICIES,
        type=_device,
    )
    host_memory: str | None = option(
        "RAM budget of each rank for model state, like 600MiB (default: 80 %% of the free RAM;"
        " with --policy nvme a third of 16 bytes per parameter of the rank, but at least 256MiB and"
        " never less than what works)",
        metavar="BYTES",
    )
    device_memory: str | None = option(
        "device memory budget for model state; leave room for activations (default on a GPU: 70 %%"
        " of what is free, and after two steps all that a step leaves free)",
        metavar="BYTES",
    )
    process_memory: str | None = option(
        "RAM budget of the whole process, like 3GiB: model state gets what activations, libraries"
        " and data leave; auto: the limit of the cgroup or of ulimit (default: no limit)",
        metavar="BYTES",
    )
    activation_memory: str | None = option(
        "part of the RAM budget for activations, like 1GiB or auto (a quarter); the rest of them"
        " goes to NVMe until backward needs it (default: all stay in RAM and are not counted)",
        metavar="BYTES",
    )
    gradient_checkpointing: bool = option(
        "recompute all layers in backward, so that only their inputs are kept; --process-memory"
        " and --activation-memory recompute as many as they have to",
        False,
    )
    recompute: str = option(
        "layers to recompute in backward, where --activation-memory or --process-memory limits"
        " activations: auto (until the others fit), none or all. The result has the same bits",
        RECOMPUTE[0],
        choices=RECOMPUTE,
        advanced=True,
    )
    nvme_path: tuple[str, ...] = option(
        "existing folder on NVMe for the state file, once per disk (default: the run folder)",
        (),
        metavar="DIR",
    )
    nvme_capacity: str | None = option(
        "budget of the state file (default: 95 %% of the free space)",
        metavar="BYTES",
        advanced=True,
    )
    allow_ram_filesystem: bool = option(
        "for trials: let --nvme-path be on a filesystem whose files are RAM, like /dev/shm; the"
        " budget of the file (default: half) is then taken from --host-memory",
        False,
        advanced=True,
    )
    dtype: str | None = option(
        "dtype of parameters and gradients: bf16, fp16 or fp32; the optimizer's master weights"
        " are fp32 in any case (default: bf16 where the hardware has it, else fp32)",
        choices=DTYPES,
    )
    state_dtype: str = option(
        "dtype of the optimizer's moments; bf16 halves them, 8bit quarters them, both rounded"
        " stochastically",
        "fp32",
        choices=STATE_DTYPES,
    )
    zero_stage: int = option(
        "state that several ranks (started by torchrun) shard: 1: optimizer state; 2: gradients as"
        " well; 3: parameters as well, with the least memory and the most traffic",
        3,
    )
    shard_ranks: int | None = option(
        "number of neighbouring ranks that shard the model state among them; each further group of"
        " as many has a copy (default: all ranks are one group)",
        least=1,
    )
    tiled_loss: bool | None = option(
        "compute the loss from a part of the logits at a time: much less memory with a large"
        " vocabulary, a third more FLOPs in the head, and gradients with other last bits"
        " (default: where whole logits would take a quarter of --process-memory)"
    )

    backend: str = option(
        "where forward and backward run: auto, the GPU if there is one; cpu; or cuda (or gpu)",
        "auto",
        metavar="{auto,cpu,cuda}",
        choices=BACKENDS,
        type=_device,
    )
    threads: int | None = option(
        "CPU threads of torch and of the optimizer (default: torch's own number, and all CPUs)",
        least=1,
    )
    prefetch: bool = option(
        "fetch parameters and optimizer states before they are needed (default: on)",
        True,
        advanced=True,
    )
    verify_reads: bool = option(
        "compare all reads from NVMe with checksums; always on with --commit-every",
        False,
        advanced=True,
    )
    overlap_updates: str = option(
        "work that optimizer updates overlap with: none; forward (each module of the next forward"
        " waits for its own parameters); backward (a chunk is updated when its gradients are"
        " complete, and again if the step is clipped by another factor than the steps before);"
        " both; auto (both, while the factor stays the same). The result has the same bits",
        OverlapUpdates.AUTO.value,
        choices=OVERLAPS,
        advanced=True,
    )
    chunk_numel: int | None = option(
        "elements per chunk, the unit that moves between tiers; larger ones transfer faster and"
        " need larger budgets (default: the size that wastes least)",
        least=1,
        advanced=True,
    )
    io_engine: str = option(
        "how files are read and written: io_uring; threads; or auto",
        "auto",
        choices=IO_ENGINES,
        advanced=True,
    )
    link_gbps: float | None = option(
        "with --backend emulated, for trials without a GPU: GB/s in each direction between RAM and"
        " a --device-memory of its own (default: 16)",
        advanced=True,
    )

    steps: int = option("optimizer steps", 40, least=1)
    # A causal model predicts the next token, so a sequence of one token has no loss.
    seq_len: int = option("tokens per sequence", 128, least=2)
    batch_size: int = option("sequences per micro-batch, on each rank", 4, least=1)
    accumulate: int = option("micro-batches per step, on each rank", 1, least=1)
    optimizer: str = option(
        "lion keeps one moment instead of two, adagrad a sum, sgd a momentum of 0.9",
        "adamw",
        choices=OPTIMIZERS,
    )
    lr: float = option("peak learning rate", 3e-4)
    warmup: int = option("steps in which the learning rate rises to its peak", 10)
    schedule: str = option("learning rate after the warm-up", "cosine", choices=SCHEDULES)
    weight_decay: float = option(
        "of matrices, not of biases and norms; decoupled, except for adagrad and sgd", 0.1
    )
    clip: float = option("gradient norm to clip to; 0: no clipping", 1.0)
    seed: int = option("of the initial weights and of the data order", 0)

    run_dir: str | None = option(
        "folder for options, metrics, figure.png and report.html (default: runs/TIME)",
        metavar="DIR",
    )
    save_every: int | None = option(
        "steps between checkpoints, in the folder `checkpoints` of the run folder. The last step is"
        " saved as well; SIGTERM saves and ends the run (default: none)",
        least=1,
    )
    save_model: bool = option(
        "write the trained weights to the folder `model` of the run folder, which hetero generate"
        " and transformers read (default: on)",
        True,
    )
    commit_every: int | None = option(
        "steps between commits: the state stays in files in --nvme-path, and after a crash --resume"
        " continues from the last commit; cheaper than as many checkpoints (default: none)",
        least=1,
        advanced=True,
    )
    keep: int = option("number of the latest checkpoints to keep", 2, least=1, advanced=True)
    resume: str | None = option(
        "continue from a checkpoint, or from the last one in a run folder, with any number of ranks"
        " and any budgets; an earlier one needs a new --run-dir. Without PATH: from the last"
        " checkpoint or commit of --run-dir, or else of the newest run, or from the beginning if"
        " there is none",
        metavar="PATH",
        nargs="?",
        const="",
    )
    timeline: str | None = option(
        "also write the last two steps (compute, waits, transfers), which report.html draws, as a"
        " trace for ui.perfetto.dev, such as steps.trace.json",
        metavar="FILE",
    )
    json: bool = option("print one JSON object on stdout instead of a table", False)
    live: bool = option("on a terminal show memory and its budgets, loss and speed", False)
    log_every: int = option(
        "steps between lines of progress where there is no terminal", 10, least=1, advanced=True
    )

    def __post_init__(self) -> None:
        for field_ in dataclasses.fields(self):
            value, least = getattr(self, field_.name), field_.metadata["least"]
            arguments = field_.metadata["arguments"]
            choices = arguments.get("choices")
            means_something = "" in (field_.default, arguments.get("const"))
            texts = value if isinstance(value, tuple) else (value,)
            if "" in texts and not means_something:  # as a path it would be the working folder
                raise ValueError(
                    f"{flag(field_.name)} is given as an empty text, as an unset variable of a "
                    f"shell gives it; give a value, or leave it out"
                )
            if least is not None and value is not None:
                self._require(field_.name, value >= least, f"at least {least}")
            if choices is not None and value is not None:
                self._require(field_.name, value in choices, f"one of {', '.join(choices)}")
        for name in ("lr", "weight_decay", "clip"):
            value = getattr(self, name)
            self._require(name, math.isfinite(value) and value >= 0, "a finite number, 0 or more")
        self._require("warmup", self.warmup >= 0, "0 or more")
        self._require("seed", 0 <= self.seed < 2**63, "in [0, 2**63)")
        has_budget = self.activation_memory is not None or self.process_memory is not None
        if self.recompute == "all" and not has_budget:
            raise ValueError(
                "--recompute all is for what --activation-memory limits; give it, too (auto is "
                "enough), or --gradient-checkpointing instead"
            )
        if self.vocab_size is not None and self.config_path is not None:
            raise ValueError(
                f"--vocab-size is for models by name; set vocab_size in {self.config_path}"
            )

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{flag(name)} must be {expected}, got {getattr(self, name)}")

    @property
    def config_path(self) -> Path | None:
        """The configuration of the model; None: --model is the name of a built-in shape."""
        return config_path(self.model)

    @property
    def overlap(self) -> OverlapUpdates:
        return OverlapUpdates(self.overlap_updates)

    @property
    def keeps_state(self) -> bool:
        """Whether the run saves or commits."""
        return self.save_every is not None or self.commit_every is not None

    @property
    def tokens_per_step(self) -> int:
        """Of each rank."""
        return self.accumulate * self.batch_size * self.seq_len

    @classmethod
    def from_namespace(cls: type[Options], namespace: argparse.Namespace) -> Options:
        """What was parsed; options that the parser does not have keep their defaults."""
        names = {each.name for each in dataclasses.fields(cls)}
        values = {name: value for name, value in vars(namespace).items() if name in names}
        # argparse has None for an option that was not given, and a list otherwise.
        return cls(**values | {"nvme_path": tuple(values["nvme_path"] or ())})

    def as_dict(self) -> dict[str, Any]:
        """The command and its options, as a job file has them."""
        command = type(self).__name__.removesuffix("Options").lower()
        return {"command": command, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainOptions):
    """The options of `hetero finetune`; raises ValueError for values that make no sense."""

    # The folder and the epochs say the first three, TRL does without the rest.
    LEFT_OUT = "vocab_size steps save_model commit_every timeline"

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
        "folder on NVMe, once per disk; with --machine it need not exist (default: none)",
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


def config_path(model: str) -> Path | None:
    """The configuration that `model` is the path of, or the folder of; None if it is a name."""
    path = Path(model)
    if not (os.sep in model or path.suffix == ".json" or path.is_dir()):
        return None
    return path / "config.json" if path.is_dir() else path


def flag(name: str) -> str:
    """The command-line spelling of an option."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def add_train_arguments(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, object] | None = None,
    options: type[TrainOptions] = TrainOptions,
) -> None:
    """Adds the options of a class to `parser`, in groups; `defaults` replace some of theirs."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    title, description = "", None
    for each in dataclasses.fields(options):
        title, description = GROUPS.get(each.name, (title, description))
        if each.name in options.LEFT_OUT.split():
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(title, description)
        about, kind = each.metadata, str(each.type).removesuffix(" | None")
        default: Any = (defaults or {}).get(each.name, each.default)
        text, arguments = about["help"], {"default": default}
        if kind == "bool":
            arguments["action"] = argparse.BooleanOptionalAction
        else:
            type_, metavar = {"int": (int, "N"), "float": (float, "X")}.get(kind, (str, "NAME"))
            shown = {} if "choices" in about["arguments"] else {"metavar": metavar}
            arguments |= {"type": type_, **shown, **about["arguments"]}
            if each.name == "nvme_path":
                # argparse appends to a list, or to a new one in place of None.
                arguments |= {"action": "append", "default": list(default) or None}
            # Options whose default is computed explain it in words.
            if default not in (None, (), ""):
                text += " (default: %(default)s)"
        added = groups[title].add_argument(flag(each.name), dest=each.name, **arguments)
        added.help = text  # here, because argparse adds to that of a switch
        added.advanced = about["advanced"]  # type: ignore[attr-defined]
        if each.name in _TRAINER_FLAGS:
            hidden: dict[str, Any] = dict.fromkeys(("help", "default"), argparse.SUPPRESS)
            hidden |= {"dest": each.name, "type": added.type}
            groups[title].add_argument(_TRAINER_FLAGS[each.name], **hidden)
