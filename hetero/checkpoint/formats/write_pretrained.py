"""Writes a folder of Hugging Face's from a checkpoint of another format."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from hetero.checkpoint.manifest import TensorRecord
from hetero.checkpoint.model_tensors import master_key
from hetero.checkpoint.pretrained.weight_files import OpenFiles, WeightFiles
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint

_MOST_BYTES = 5 << 30  # of tensors in a file, as save_pretrained() has it


def write_pretrained(stored: StoredCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes safetensors files, and their index if there are several, into `folder`.

    `dtype` is that of parameters; buffers keep their own. Tied parameters have their first name
    alone, as from_pretrained() wants it.
    """
    manifest = stored.manifest
    tensors: dict[str, TensorRecord] = {}
    for name in (*manifest.params, *manifest.buffers):
        tensors[name] = manifest.tensors[master_key(name)]
        if dtype is not None and name in manifest.params:
            tensors[name] = replace(tensors[name], dtype=dtype)
    files = WeightFiles.of(tensors, _MOST_BYTES)
    files.make(folder)
    with closing(OpenFiles(folder, files)) as opened:
        for name, place in files.places.items():
            begin = 0
            for values in stored.parts(master_key(name)):
                opened.write(place, begin, values)
                begin += values.numel()
