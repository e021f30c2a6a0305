"""Exports into folders that have other files, too."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hetero.checkpoint.pretrained.save import save_pretrained

_BESIDE = "export"  # a folder in the folder, while files are on their way


def export_into(model: torch.nn.Module, folder: Path, leads: bool) -> None:
    """hetero.save_pretrained() into a folder whose other files stay. All ranks call it.

    Args:
        model: a managed one.
        folder: made if it is not there. Files of an earlier export are replaced, one by one.
        leads: whether this rank moves the files; one of them must.

    Raises what save_pretrained() does, and OSError.
    """
    beside = folder / _BESIDE
    save_pretrained(model, beside)
    if leads:
        for file in beside.iterdir():
            os.replace(file, folder / file.name)
        beside.rmdir()
