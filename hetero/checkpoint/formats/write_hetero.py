"""Writes a hetero checkpoint from one of another format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from hetero.checkpoint.data_writer import DataWriter, Region
from hetero.checkpoint.formats.stored_checkpoint import PART_NUMEL, StoredCheckpoint
from hetero.checkpoint.manifest import NAME, Manifest, TensorRecord
from hetero.checkpoint.model_tensors import master_key, state_key

_FILE = "rank-0000-of-0001.safetensors"


def write_hetero(stored: StoredCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes data file and manifest into `folder`, which is empty.

    Masters of trained parameters are fp32; `dtype` is that of other parameters. What a rank alone
    has (random numbers, extra) is left out: loading leaves random numbers as they are.
    """
    manifest = stored.manifest
    tensors = _tensors(manifest, dtype)
    keys = list(_in_order(manifest, tensors))
    regions = [Region(list(_entries(key, tensors[key]))) for key in keys]
    with closing(DataWriter(folder / _FILE, regions, "auto")) as writer:
        for number, key in enumerate(keys):
            if not regions[number].entries:
                continue
            region = writer.region(number)
            if tensors[key].numel:
                for values in stored.parts(key):
                    region.write(values.to(tensors[key].dtype))
            else:
                region.write(torch.empty(0, dtype=tensors[key].dtype))
            region.end()
        written = writer.finish()
    made = replace(manifest, files={_FILE: written}, tensors=tensors, ranks=())
    (folder / NAME).write_bytes(made.to_json())


def _tensors(manifest: Manifest, dtype: torch.dtype | None) -> dict[str, TensorRecord]:
    """What is written, by key."""
    found = {}
    for key, tensor in manifest.tensors.items():
        if not key.startswith("data/"):
            found[key] = tensor
    for name, param in manifest.params.items():
        key = master_key(name)
        wanted = torch.float32 if param.trained else dtype
        if wanted is not None:
            found[key] = replace(found[key], dtype=wanted)
    return found


def _in_order(manifest: Manifest, tensors: dict[str, TensorRecord]) -> Iterator[str]:
    """Each parameter's master and its states, one after the other, as loading reads them."""
    states = {
        name: optimizer.states
        for optimizer in manifest.optimizers
        for group in optimizer.groups
        for name in group.params
    }
    given = set()
    for name in manifest.params:
        for key in (master_key(name), *(state_key(name, s) for s in states.get(name, ()))):
            if key in tensors:
                given.add(key)
                yield key
    yield from (key for key in tensors if key not in given)


def _entries(key: str, tensor: TensorRecord) -> Iterator[tuple[str, torch.dtype, int]]:
    if not tensor.numel:
        yield f"{key}@0", tensor.dtype, 0
    for begin in range(0, tensor.numel, PART_NUMEL):
        yield f"{key}@{begin}", tensor.dtype, min(PART_NUMEL, tensor.numel - begin)
