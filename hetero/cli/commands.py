"""The commands of `hetero`: the options of each, its help, and the function that runs it.

This is read before any of them runs, so it imports neither torch nor what a command needs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from hetero.job.options import FinetuneOptions, PlanOptions, TrainOptions
from offload.profile.machine_profile import default_path

Option = tuple[tuple[str, ...], dict[str, Any]]  # flags, and what add_argument() takes


@dataclass(frozen=True)
class Command:
    """A command of `hetero`.

    Attributes:
        name: as it is called.
        run: the function that runs it, by its full name; it takes the parsed arguments and returns
            an exit code.
        help: a line for the list of all commands.
        description: for its own help.
        examples: command lines, and what each does.
        options: of the parser.
        training: the class that has its options, besides those.
        synopsis: of its options, where argparse's own would be longer than the help.
    """

    name: str
    run: str
    help: str
    description: str
    examples: tuple[tuple[str, str], ...]
    options: tuple[Option, ...] = ()
    training: type[TrainOptions] | None = None
    synopsis: str | None = None


def _option(*flags: str, **about: Any) -> Option:
    return flags, about


def _switch(flag: str, help: str) -> Option:
    return _option(flag, action="store_true", help=help)


def _folders(help: str) -> Option:
    return _option("--nvme-path", action="append", metavar="DIR", help=help)


_TRAIN = Command(
    "train",
    "hetero.cli.train.run",
    "train a language model within budgets of RAM and device memory",
    "Trains a language model on the bytes of a text. Without options: 304M parameters, four to"
    " eight minutes on two CPU cores, on the source text of Python's standard library. Sizes are"
    " bytes, or like 600MiB and 4GiB. Budgets are never exceeded; one that is too small is refused"
    " with the smallest that works. Under torchrun the ranks shard the model state.",
    (
        ("hetero train --max-steps 20", "the model of 304M parameters for two minutes"),
        (
            "hetero train --model gpt2 --vocab-size 50257 --host-memory 600MiB",
            "another shape, within a budget of RAM; the rest of its state is on NVMe",
        ),
        (
            "hetero train --data README.md --nvme-path /mnt/nvme --json",
            "another text, another disk, and a JSON object as the report",
        ),
        (
            "hetero train --policy cpu --process-memory auto",
            "all in RAM, and within what a container allows",
        ),
        (
            "hetero train --config runs/first --max-steps 80",
            "the options of an earlier run, or of a YAML file, and more steps",
        ),
        (
            "torchrun --nproc-per-node 2 -m hetero.cli train --max-steps 20",
            "two ranks, each with half of the model state",
        ),
    ),
    training=TrainOptions,
    synopsis="[OPTION ...]",
)

_FINETUNE = Command(
    "finetune",
    "hetero.cli.finetune.run.run",
    "fine-tune a Hugging Face model within budgets",
    "Fine-tunes a causal language model from a local folder, whole or with a LoRA adapter, by TRL's"
    " SFTTrainer, and writes a folder that from_pretrained() reads. Conversations are written by"
    " the tokenizer's chat template, and their answers alone are learned; texts are learned whole."
    " All data are checked before training starts. Budgets are those of hetero train; under"
    " torchrun the ranks shard the model state.",
    (
        (
            "hetero finetune --model llama --data alpaca.jsonl --output tuned --lora-rank 16",
            "an adapter, learned from instructions",
        ),
        (
            "hetero finetune --model llama --data texts --output tuned --host-memory 8GiB",
            "the whole model, learned from a folder of texts, in 8 GiB of RAM",
        ),
        (
            "hetero finetune --model llama --data train.jsonl --eval-data test.jsonl --output"
            " tuned --eval-steps 50 --early-stopping-patience 3",
            "the model with the lowest loss on other records, evaluated every 50 steps",
        ),
    ),
    training=FinetuneOptions,
    synopsis="--model DIR --data PATH --output DIR [OPTION ...]",
)

_GENERATE = Command(
    "generate",
    "hetero.cli.generate.run",
    "generate text with a trained model",
    "Prints a prompt and the text with which a model continues it: the model of the newest run of"
    " hetero train, or of a folder. The whole model is in memory. Without a tokenizer in the folder"
    " tokens are bytes, as in hetero train.",
    (
        ("hetero generate", "with the model of the newest run"),
        ("hetero generate runs/first --prompt 'class ' --tokens 400", "with that of a run"),
        ("hetero generate my-model --temperature 0", "always the most probable token"),
    ),
    (
        _option(
            "path",
            nargs="?",
            metavar="FOLDER",
            help="a run folder of hetero train, or a folder of a Hugging Face causal language model"
            " (default: the newest run in runs)",
        ),
        _option("--prompt", default="def ", help="text to continue (default: %(default)r)"),
        _option(
            "--chat",
            action="store_true",
            help="answer the prompt as a message of a user, by the tokenizer's chat template",
        ),
        _option(
            "--tokens",
            type=int,
            default=200,
            help="number of tokens to generate (default: %(default)s)",
        ),
        _option(
            "--temperature",
            type=float,
            default=0.8,
            help="higher is more varied; 0: always the most probable token (default: %(default)s)",
        ),
        _option(
            "--top-k",
            type=int,
            default=40,
            help="number of most probable tokens to draw from; 0: all (default: %(default)s)",
        ),
        _option("--seed", type=int, default=0, help="seed of the draws (default: %(default)s)"),
    ),
)

_PLAN = Command(
    "plan",
    "hetero.cli.plan.run",
    "predict where a model's state lives, and how long a step takes",
    "Places a model's state without building the model, and predicts the time of a step from the"
    " profile of this machine, which `hetero profile` measures, or of another one. Budgets are"
    " those of one rank.",
    (
        ("hetero plan", "the default model of `hetero train`, on this machine"),
        (
            "hetero plan --machine rtx4090-nvme --model llama-7b --nvme-path /nvme",
            "on another one; the folder need not exist",
        ),
        (
            "hetero plan --machine 8xh200-node --model llama-70b --ranks 64 --nodes 8",
            "on several machines; --machine list lists those that are described",
        ),
    ),
    training=PlanOptions,
    synopsis="[OPTION ...]",
)

_PROFILE = Command(
    "profile",
    "hetero.cli.profile.run",
    "measure this machine, for plan",
    "Measures RAM, optimizer updates, matmuls and, in the given folders, NVMe, for about 15"
    " seconds, and saves the figures. Nothing else should run meanwhile.",
    (
        ("hetero profile", "without disks"),
        ("hetero profile --nvme-path .", "with the disk of this folder"),
        ("hetero profile --threads 4 --output machine.json", "for hetero plan --machine"),
    ),
    (
        _folders(
            "existing folder on NVMe; give it once per disk to measure several together"
            " (default: none)"
        ),
        _option(
            "--threads", type=int, metavar="N", help="of updates and matmuls (default: all CPUs)"
        ),
        _option("--output", metavar="FILE", help=f"where to save (default: {default_path()})"),
        _switch("--json", "print the profile as a JSON object on stdout"),
    ),
)

_DOCTOR = Command(
    "doctor",
    "hetero.cli.doctor.run",
    "check this machine, and suggest fixes",
    "Checks what hetero needs of this machine: io_uring, locked memory, disks, memory limits, huge"
    " pages, NUMA, GPUs, and what is installed. Each finding is ok, a note (hetero works, but"
    " slower or with less) or a problem, with a fix. The exit code is 1 if there is a"
    " problem.",
    (
        ("hetero doctor", "this machine, and the folder you are in"),
        ("hetero doctor --nvme-path /tmp", "another folder, once per disk"),
        ("hetero doctor --no-disk-speed --json", "without writing, for programs"),
    ),
    (
        _folders("folder for state files; once per disk (default: the one you are in)"),
        _switch(
            "--no-disk-speed",
            "do not measure disks, which writes up to 256 MiB in each folder and takes seconds",
        ),
        _switch("--json", "print findings and facts as a JSON object on stdout"),
    ),
)

_INSPECT = Command(
    "inspect",
    "hetero.cli.checkpoints.inspect",
    "show what is in a checkpoint",
    "Shows what a checkpoint has: steps, parameters, optimizers, files. It may be a checkpoint of"
    " hetero, the last commit of a durable state, a Hugging Face folder or a .safetensors file, a"
    " checkpoint of torch.distributed.checkpoint (DCP), or one in DeepSpeed's universal format."
    " Values are not read, and no code in a file runs.",
    (
        ("hetero inspect runs/first", "the latest checkpoint of a run, or else its weights"),
        ("hetero inspect runs/first/step-100 --verify", "compare all checksums"),
        ("hetero inspect model.safetensors --json", "every parameter, for programs"),
    ),
    (
        _option(
            "path",
            help="the checkpoint, or the run folder; of several checkpoints in a folder the latest"
            " one",
        ),
        _switch(
            "--verify",
            "read every byte of a hetero checkpoint and compare checksums; damage is listed, and"
            " the exit code is then 1",
        ),
        _switch("--json", "print a JSON object with all parameters on stdout"),
    ),
)

_CONVERT = Command(
    "convert",
    "hetero.cli.checkpoints.convert",
    "write a checkpoint in another format",
    "Writes a checkpoint in another format, without a model and with at most one tensor in memory."
    " It reads all formats that `hetero inspect` reads. Between hetero and DCP it converts"
    " optimizer state and options as well; to Hugging Face parameters and buffers.",
    (
        (
            "hetero convert runs/first exported --to hf --model-config config.json",
            "for transformers' from_pretrained()",
        ),
        ("hetero convert runs/first resharded --to dcp", "for torch.distributed.checkpoint"),
        ("hetero convert universal-folder imported --to hetero", "to continue a run of DeepSpeed"),
    ),
    (
        _option("source", help="the checkpoint, as `hetero inspect` takes it"),
        _option("target", help="the new folder, which must not exist yet"),
        _option(
            "--to",
            required=True,
            choices=("hetero", "hf", "dcp"),
            help="the format: hetero, hf (Hugging Face), or dcp (torch.distributed.checkpoint)",
        ),
        _option(
            "--dtype",
            choices=("fp32", "bf16", "fp16"),
            help="dtype of parameters (default: as stored; masters are fp32); with --to hetero, of"
            " those that are not trained",
        ),
        _option(
            "--model-config",
            dest="config",
            metavar="PATH",
            help="with --to hf: a config.json to copy, or a folder that has one",
        ),
    ),
)

_BENCH = Command(
    "bench",
    "hetero.cli.bench.run",
    "measure hetero, compared with the limits of this machine and other libraries",
    "Runs one of the benchmarks of docs/benchmarks.md; without a name it lists them. Other"
    " libraries are measured as well if they are installed.",
    (
        ("hetero bench", "the list"),
        ("hetero bench io --path .", "the disk, compared with fio and others"),
        ("hetero bench adam --peers torch", "update kernels, compared with torch's"),
        ("hetero bench train --help", "the options of one of them"),
    ),
    (
        _option("name", nargs="?", metavar="NAME", help="one of those listed"),
        _option("options", nargs=argparse.REMAINDER, metavar="OPTION", help="its own options"),
    ),
    synopsis="[NAME [OPTION ...]]",
)

# As the help lists them.
COMMANDS = (_TRAIN, _FINETUNE, _GENERATE, _PLAN, _PROFILE, _DOCTOR, _INSPECT, _CONVERT, _BENCH)
