"""What the user asked for."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from hetero.overlap import OverlapUpdates

DEFAULT_MODEL = "gpt2-100m"

SCHEDULES = ("cosine", "constant")
OPTIMIZERS = ("adamw", "lion", "adagrad")
STATE_DTYPES = ("fp32", "bf16")
OVERLAPS = tuple(overlap.value for overlap in OverlapUpdates)


def _option(
    default: Any,
    help: str,
    *,
    type: Callable[[str], object] | None = None,
    metavar: str | None = None,
    group: str = "training",
    choices: tuple[str, ...] | None = None,
    repeated: bool = False,
) -> Any:
    """A field that is also a command-line option `--its-name`; `repeated`: a tuple of values."""
    metadata = {
        "help": help,
        "type": type,
        "metavar": metavar,
        "group": group,
        "choices": choices,
        "repeated": repeated,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `hetero train`; raises ValueError for values that make no sense.

    Byte amounts stay as the user wrote them ("4GiB" or a number); hetero.Config parses them.
    """

    model: str = _option(DEFAULT_MODEL, "model by name", metavar="NAME", group="model and data")
    config: str | None = _option(
        None,
        "JSON file with the configuration of any Hugging Face causal language model",
        metavar="FILE",
        group="model and data",
    )
    vocab_size: int | None = _option(
        None,
        "vocabulary of a model by name, at least 256 (default: 256, one token per byte value)",
        type=int,
        metavar="N",
        group="model and data",
    )
    data: str | None = _option(
        None,
        "file or folder to train on (default: the source text of Python's standard library)",
        metavar="PATH",
        group="model and data",
    )

    policy: str = _option(
        "nvme", "where the model state lives: cuda, cpu, nvme or auto", group="memory"
    )
    backend: str = _option(
        "cpu",
        "where compute happens: cpu, cuda, auto: the GPU if there is one; or emulated: the CPU as"
        " if it had memory of its own",
        metavar="NAME",
        group="memory",
    )
    link_gbps: float | None = _option(
        None,
        "GB/s each way between RAM and the emulated device (default: 16)",
        type=float,
        metavar="X",
        group="memory",
    )
    host_memory: str | None = _option(
        None,
        "RAM for model state, of each rank, like 600MiB (default: under nvme a third of 16 bytes"
        " per parameter of its share, but at least 256MiB; else no limit)",
        metavar="BYTES",
        group="memory",
    )
    device_memory: str | None = _option(
        None,
        "memory of the device for model state (default: no limit; of cuda 70 %% of what is free;"
        " needed by --backend emulated)",
        metavar="BYTES",
        group="memory",
    )
    process_memory: str | None = _option(
        None,
        "RAM that the process may hold in all, like 3GiB: model state gives way to what else it"
        " needs; auto: what the system allows (default: no limit)",
        metavar="BYTES",
        group="memory",
    )
    nvme_path: tuple[str, ...] = _option(
        (),
        "existing folder for the state file; give it once per disk to use several (default: the run"
        " folder)",
        metavar="DIR",
        group="memory",
        repeated=True,
    )
    nvme_capacity: str | None = _option(
        None, "size limit of the state file (default: none)", metavar="BYTES", group="memory"
    )
    dtype: str | None = _option(
        None,
        "bf16, fp16 or fp32 (default: bf16 where the hardware has it, else fp32)",
        group="memory",
    )
    state_dtype: str = _option(
        "fp32",
        "optimizer states; bf16 is rounded stochastically",
        choices=STATE_DTYPES,
        group="memory",
    )
    chunk_numel: int | None = _option(
        None,
        "elements per chunk (default: searched for little waste)",
        type=int,
        metavar="N",
        group="memory",
    )
    io_engine: str = _option("auto", "auto, io_uring or threads", metavar="NAME", group="memory")
    prefetch: bool = _option(True, "fetch what is needed next ahead of time", group="memory")
    overlap_updates: str = _option(
        OverlapUpdates.NONE.value,
        "what updates overlap with: the next forward, backward, or both; backward and both need"
        " --clip 0 and one rank",
        choices=OVERLAPS,
        group="memory",
    )
    zero_stage: int = _option(
        3,
        "what several ranks share: 1 optimizer state, 2 also gradients, 3 also parameters",
        type=int,
        metavar="N",
        group="memory",
    )

    steps: int = _option(90, "optimizer steps", type=int, metavar="N")
    seq_len: int = _option(128, "tokens per sequence", type=int, metavar="N")
    batch_size: int = _option(8, "sequences per micro-batch of a rank", type=int, metavar="N")
    accumulate: int = _option(1, "micro-batches of a rank per step", type=int, metavar="N")
    optimizer: str = _option("adamw", "the optimizer", choices=OPTIMIZERS)
    lr: float = _option(3e-4, "peak learning rate", type=float)
    warmup: int = _option(20, "steps of linear warm-up", type=int, metavar="N")
    schedule: str = _option("cosine", "learning rate after the warm-up", choices=SCHEDULES)
    weight_decay: float = _option(
        0.1, "weight decay of matrices; decoupled but for adagrad", type=float, metavar="X"
    )
    clip: float = _option(1.0, "gradient norm to clip to; 0 for no clipping", type=float)
    seed: int = _option(0, "seed of the weights and of the data order", type=int, metavar="N")
    threads: int | None = _option(
        None,
        "CPU threads for compute and optimizer (default: torch's, and all usable CPUs)",
        type=int,
        metavar="N",
    )

    run_dir: str | None = _option(
        None, "folder for metrics and figure (default: runs/TIME)", metavar="DIR", group="output"
    )
    timeline: str | None = _option(
        None,
        "picture (.png, .svg or .pdf) of what computes, waits and moves when in the last two steps"
        " of a run that finishes, with a trace (.trace.json) for ui.perfetto.dev beside it; of"
        " several ranks the first one's",
        metavar="FILE",
        group="output",
    )
    json: bool = _option(
        False, "print one JSON object on stdout instead of a table", group="output"
    )
    log_every: int = _option(
        10, "steps between lines when not on a terminal", type=int, metavar="N", group="output"
    )

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "log_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        # A causal model predicts the next token, so a sequence of one token has no loss.
        self._require("seq_len", self.seq_len >= 2, "at least 2")
        for name in ("threads", "chunk_numel"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1")
        for name in ("lr", "weight_decay", "clip"):
            value = getattr(self, name)
            self._require(name, math.isfinite(value) and value >= 0, "a finite number, 0 or more")
        self._require("warmup", self.warmup >= 0, "0 or more")
        self._require(
            "overlap_updates",
            self.overlap_updates not in ("backward", "both") or self.clip == 0,
            "none or forward without --clip 0, because clipping needs all gradients before the"
            " first update",
        )
        self._require("seed", 0 <= self.seed < 2**63, "in [0, 2**63)")
        for name, choices in (
            ("schedule", SCHEDULES),
            ("optimizer", OPTIMIZERS),
            ("state_dtype", STATE_DTYPES),
            ("overlap_updates", OVERLAPS),
        ):
            self._require(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        if self.config is not None and self.vocab_size is not None:
            raise ValueError(
                "--vocab-size is for models by name; with --config set vocab_size in the file"
            )

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{flag(name)} must be {expected}, got {getattr(self, name)}")

    @property
    def overlap(self) -> OverlapUpdates:
        """overlap_updates, for who plans."""
        return OverlapUpdates(self.overlap_updates)

    @property
    def tokens_per_step(self) -> int:
        """Of each rank."""
        return self.accumulate * self.batch_size * self.seq_len

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> TrainOptions:
        values = {f.name: getattr(namespace, f.name) for f in dataclasses.fields(cls)}
        repeated = [f.name for f in dataclasses.fields(cls) if f.metadata["repeated"]]
        # argparse has None for an option that was not given, and lists otherwise.
        return cls(**values | {name: tuple(values[name] or ()) for name in repeated})

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def flag(name: str) -> str:
    """The command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def to_arguments(options: TrainOptions) -> list[str]:
    """The command line that says the same as `options`."""
    arguments = []
    for name, value in options.as_dict().items():
        if isinstance(value, bool):
            if value != getattr(TrainOptions, name):
                arguments.append(flag(name) if value else "--no-" + flag(name).removeprefix("--"))
        elif isinstance(value, tuple):
            arguments += [f"{flag(name)}={each}" for each in value]
        elif value is not None:
            # One word, so that a value may begin with a dash.
            arguments.append(f"{flag(name)}={value}")
    return arguments


def add_train_arguments(
    parser: argparse.ArgumentParser, defaults: Mapping[str, object] | None = None
) -> None:
    """Adds every option of TrainOptions; `defaults` replaces some of its defaults."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in dataclasses.fields(TrainOptions):
        about = option.metadata
        if about["group"] not in groups:
            groups[about["group"]] = parser.add_argument_group(about["group"])
        default = (defaults or {}).get(option.name, option.default)
        # "%(default)s" is argparse's; options whose default is computed explain it in words.
        shown = "" if default in (None, ()) else " (default: %(default)s)"
        arguments: dict[str, Any] = {"default": default, "help": about["help"] + shown}
        if default is False:
            arguments |= {"action": "store_true", "help": about["help"]}
        elif default is True:
            arguments |= {"action": argparse.BooleanOptionalAction, "help": about["help"]}
        else:
            arguments |= {"type": about["type"], "metavar": about["metavar"]}
            if about["repeated"]:
                # argparse appends to a list, or to a new one in place of None.
                given = cast("tuple[str, ...]", default)
                arguments |= {"action": "append", "default": list(given) or None}
            if about["choices"]:
                arguments["choices"] = about["choices"]
            elif about["metavar"] is None:
                arguments["metavar"] = "X" if about["type"] is float else "NAME"
        groups[about["group"]].add_argument(flag(option.name), **arguments)
