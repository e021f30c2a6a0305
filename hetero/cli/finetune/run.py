"""`hetero finetune`: from its folders to its result, as `hetero train` makes a training."""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers.utils import logging

from hetero.checkpoint.folder import TRAINER_STATE_NAME
from hetero.cli.finetune.data import read_data
from hetero.cli.finetune.pretrained import FolderModel
from hetero.cli.finetune.trainer import RunCallback, make_trainer
from hetero.cli.outcome import make_writable
from hetero.cli.train import run_training
from hetero.integrations.adapters import adapter_state, merged
from hetero.integrations.exports import export_into, moved_into
from hetero.job.job import build_in_budgets, make_setting
from hetero.job.options import FinetuneOptions
from hetero.job.ranks import Ranks
from hetero.job.resume import DATA_KEY, extra_of
from hetero.job.run import Observer, TrainingRun, failing_of_the_run
from hetero.job.run_folder import RunFolder
from hetero.reporting.run_record import RunRecord

# What from_pretrained() would read of an earlier result, before or beside a new one of another
# kind or number of files. Other files in the folder are not ours to remove.
_RESULT_FILES = (
    "adapter_config.json",
    "adapter_model.*",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
)


def run(arguments: argparse.Namespace) -> int:
    """Fine-tunes, exports, and prints a report."""
    options = FinetuneOptions.from_namespace(arguments)
    for name in ("model", "data", "output"):
        if not getattr(options, name):
            raise ValueError(f"--{name} is missing; `hetero finetune --help` says what it is")
    # TRL gathers figures where it computes.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    return run_training("finetune", options, partial(fine_tune, options), backend)


def fine_tune(
    options: FinetuneOptions, folder: RunFolder, observer: Observer, ranks: Ranks
) -> RunRecord:
    """Fine-tunes and exports as the options say; all ranks must call it with the same ones.

    Returns:
        What was measured. Its status and failure say what ended the run early.

    Raises:
        ValueError, hetero.HeteroError: before the first step, for what cannot work.
    """
    # Progress is the observer's: what the libraries say is about downloads and files.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|trl")
    if options.save_every or options.early_stopping_patience:
        folder.require_shared("--save-every" if options.save_every else "--early-stopping-patience")
    for name, modules in {
        "tensorboard": ("tensorboard", "tensorboardX"),
        "wandb": ("wandb",),
    }.items():
        if name in options.report_to.split(",") and not any(map(importlib.util.find_spec, modules)):
            raise ValueError(f"--report-to {name}: it is not installed; pip install {name}")
    source = FolderModel(options)
    tokenizer = source.tokenizer

    def read(path: str | None) -> Any:
        return path and read_data(path, tokenizer, options.seq_len, options.format)

    data = read(options.data), read(options.eval_data)
    ranks.from_first(lambda: _check_output(options))
    run = TrainingRun(options, folder, observer, ranks)
    path = run.beginning.path
    about = {
        "seed": options.seed,
        "sequences": len(data[0]),
        "sequences_per_step": options.batch_size * options.accumulate * ranks.count,
    }
    notes = []
    if path is not None:
        found = extra_of(path)
        _check_goes_on(options, path, found, about)
        notes.append(f"resumed after step {found['step']} from {path.parent}")
    elif options.resume is not None:
        notes.append("--resume found no checkpoint, so the run began anew")
    built = build_in_budgets(source, options, folder, ranks)
    words = f"{options.data}: {len(data[0]):,} sequences"
    with make_trainer(options, folder, built, tokenizer, data, {DATA_KEY: about}) as trainer:
        begin = partial(make_setting, built, options, folder, words)
        trainer.add_callback(RunCallback(trainer, run, begin, notes))
        with run.under_way():
            with run.sigterm_noted():
                trainer.train(resume_from_checkpoint=None if path is None else str(path.parent))
            if not run.terminated:
                with failing_of_the_run():
                    export(trainer.model, options, trainer.processing_class, ranks.leads)
                run.record.model_folder = options.output
            run.complete(trainer.initialize())
        return run.recorder.complete()


def _check_output(options: FinetuneOptions) -> str:
    """Makes --output, if it is not there; returns its path. Raises ValueError if it is unfit."""
    path = Path(options.output)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output {path} is a file; give a new folder")
    if path.is_dir() and path.samefile(options.model):
        raise ValueError(f"--output {path} is the folder of --model; give a new folder")
    if path.is_dir() and any(path.iterdir()) and options.resume is None:
        raise ValueError(f"--output {path} is not empty; give a new folder, or --resume")
    make_writable(path, f"--output {path}")
    return str(path.resolve())


def _check_goes_on(
    options: FinetuneOptions, path: Path, extra: Mapping[str, Any], run: dict[str, int]
) -> None:
    """Raises ValueError if the checkpoint is of other data or steps than `run`, or has all steps of
    the options."""
    was = extra.get(DATA_KEY)
    if was is None:
        raise ValueError(f"{path} was not saved by hetero finetune; give a checkpoint that was")
    for name, value in run.items():
        if was[name] != value:
            raise ValueError(
                f"{path.parent} has {was[name]} as {name}, and now it is {value}; give --data, "
                f"--seq-len and --seed as they were, and --batch-size, --grad-accum and ranks "
                f"whose product is {was['sequences_per_step']}"
            )
    state = json.loads((path.parent / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    steps = options.max_steps
    if state["global_step"] >= steps if steps else state["epoch"] >= options.epochs:
        raise ValueError(
            f"{path.parent} has all {state['global_step']} steps; to go on from it ask for more "
            f"than " + (f"--max-steps {steps}" if steps else f"--epochs {options.epochs:g}")
        )


# The result


def export(model: Any, options: FinetuneOptions, tokenizer: Any, leads: bool) -> None:
    """Writes the result to `options.output`, instead of an earlier one. All ranks call it.

    `leads`: whether this rank writes what only one has to. Raises StoreError, OSError, ValueError.
    """
    folder = Path(options.output)
    written: set[str] = set()
    if not options.lora_rank or options.merge:
        whole = merged(model) if options.merge else model
        written = export_into(whole, folder, leads)
    elif leads:
        written = _adapter_into(model, folder)
    if leads:
        _remove_earlier(folder, written)
        tokenizer.save_pretrained(folder)


def _adapter_into(model: Any, folder: Path) -> set[str]:
    # Beside the files of an earlier result, which stay if the disk is full.
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        model.save_pretrained(beside, state_dict=adapter_state(model))
        return moved_into(Path(beside), folder)


def _remove_earlier(folder: Path, written: set[str]) -> None:
    """Removes the files of an earlier result that the new one has not replaced."""
    for pattern in _RESULT_FILES:
        for file in folder.glob(pattern):
            if file.name not in written:
                file.unlink()
