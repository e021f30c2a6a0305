"""Writes a hetero checkpoint from one of another format."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from hetero.checkpoint.data_writer import DataWriter, Region
from hetero.checkpoint.manifest import NAME
from hetero.checkpoint.model_tensors import master_key
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint

_FILE = "rank-0000-of-0001.safetensors"


def write_hetero(stored: StoredCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes data file and manifest into `folder`, which is empty.

    Masters of trained parameters are fp32; `dtype` is that of other parameters. What a rank alone
    has (random numbers, extra) is left out: loading leaves random numbers as they are.
    """
    manifest = stored.manifest
    tensors = {k: tensor for k, tensor in manifest.tensors.items() if not k.startswith("data/")}
    for name, param in manifest.params.items():
        wanted = torch.float32 if param.trained else dtype
        if wanted is not None:
            tensors[master_key(name)] = replace(tensors[master_key(name)], dtype=wanted)
    by_key = [list(ranges) for _, ranges in groupby(stored.ranges(), key=lambda each: each[0])]
    regions = [
        Region([(f"{key}@{begin}", tensors[key].dtype, end - begin) for key, begin, end in ranges])
        for ranges in by_key
    ]
    values = stored.values()
    with closing(DataWriter(folder / _FILE, regions, "auto")) as writer:
        for number, ranges in enumerate(by_key):
            region = writer.region(number)
            for key, _, _ in ranges:
                region.write(next(values).to(tensors[key].dtype))
            region.end()
        written = writer.finish()
    made = replace(manifest, files={_FILE: written}, tensors=tensors, ranks=())
    (folder / NAME).write_bytes(made.to_json())
