"""Exports into folders that have other files, too."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hetero.checkpoint.pretrained.weight_files import save_pretrained

_BESIDE = "export"  # a folder in the folder, while files are on their way


def export_into(model: torch.nn.Module, folder: Path, leads: bool) -> set[str]:
    """hetero.save_pretrained() into a folder whose other files stay. All ranks call it.

    Args:
        model: a managed one.
        folder: made if it is not there. Files of an earlier export are replaced, one by one.
        leads: whether this rank moves the files; one of them must.

    Returns:
        the names of the files in `folder`; none on ranks that do not lead.

    Raises what save_pretrained() does, and OSError.
    """
    beside = folder / _BESIDE
    save_pretrained(model, beside)
    if not leads:
        return set()
    names = moved_into(beside, folder)
    beside.rmdir()
    return names


def moved_into(beside: Path, folder: Path) -> set[str]:
    """Moves all files of a folder into another one of the same file system; returns their names.

    Raises OSError.
    """
    names = {file.name for file in beside.iterdir()}
    for name in names:
        os.replace(beside / name, folder / name)
    return names
