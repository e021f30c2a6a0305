"""What is written at the end: the model, the adapter, or the model with the adapter merged."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hetero.cli.finetune.options import FinetuneOptions
from hetero.cli.folders import make_writable
from hetero.integrations.adapters import adapter_state, merged
from hetero.integrations.exports import export_into, moved_into

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


def check_place(folder: Path) -> str:
    """Makes the folder of the result if it is not there, and sees that files can be made in it.

    Returns:
        its absolute path.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        make_writable(folder)
    except OSError as error:
        raise ValueError(
            f"--output {folder} cannot be written: {error.strerror}; give a folder that can"
        ) from error
    return str(folder.resolve())


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
