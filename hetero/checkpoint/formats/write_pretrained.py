"""Writes a folder of Hugging Face's from a checkpoint of another format."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hetero.checkpoint.formats.stored_checkpoint import StoredCheckpoint
from hetero.checkpoint.manifest import TensorRecord
from hetero.checkpoint.model_tensors import master_key
from hetero.checkpoint.pretrained.export_folder import METADATA
from hetero.checkpoint.pretrained.stored_tensors import INDEX_NAME, WEIGHTS_NAME
from hetero.checkpoint.safetensors_header import encode

_MAX_BYTES = 5 << 30  # of tensors in a file, as save_pretrained() has it


def write_pretrained(stored: StoredCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes safetensors files, and their index if there are several, into `folder`.

    `dtype` is that of parameters; buffers keep their own. Tied parameters have their first name
    alone, as from_pretrained() wants it.
    """
    manifest = stored.manifest
    tensors: dict[str, TensorRecord] = {}
    for name in (*manifest.params, *manifest.buffers):
        tensor = manifest.tensors[master_key(name)]
        is_param = name in manifest.params and dtype is not None
        tensors[name] = TensorRecord(tensor.shape, dtype) if is_param and dtype else tensor
    shards = _shards(tensors)
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        file = WEIGHTS_NAME
        if len(shards) > 1:
            file = f"{Path(WEIGHTS_NAME).stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        head, header = encode([(n, tensors[n].dtype, tensors[n].shape) for n in names], METADATA)
        total += header.file_bytes - len(head)
        with (folder / file).open("xb") as stream:
            stream.write(head)
            for name in names:
                places[name] = file
                if not tensors[name].numel:
                    continue
                for values in stored.parts(master_key(name)):
                    flat = values.to(tensors[name].dtype).contiguous()
                    stream.write(flat.view(torch.uint8).numpy().data)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX_NAME).write_text(text, encoding="utf-8")


def _shards(tensors: dict[str, TensorRecord]) -> list[list[str]]:
    """Names by file; in a file those of larger elements first, so that all are aligned."""
    shards: list[list[str]] = [[]]
    room = _MAX_BYTES
    for name, tensor in tensors.items():
        nbytes = tensor.numel * tensor.dtype.itemsize
        if nbytes > room and shards[-1]:
            shards.append([])
            room = _MAX_BYTES
        shards[-1].append(name)
        room -= nbytes
    return [sorted(names, key=lambda name: -tensors[name].dtype.itemsize) for names in shards]
