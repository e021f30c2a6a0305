"""Converts a checkpoint to another format, a tensor's part at a time, without a model."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from hetero.checkpoint.data_writer import DataWriter
from hetero.checkpoint.formats.opening import open_checkpoint
from hetero.checkpoint.manifest import NAME, TensorRecord, master_key
from hetero.checkpoint.pretrained.weight_files import OpenFiles, WeightFiles
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.chunks.dtypes import torch_dtype
from offload.disk.durable import sync_path
from offload.disk.new_folder import NewFolder
from offload.errors import StoreError

FORMATS = ("hetero", "hf", "dcp")
_FILE = "rank-0000-of-0001.safetensors"
_MOST_BYTES = 5 << 30  # of tensors in a file of Hugging Face's, as save_pretrained() has it


def _write_hetero(stored: StoredCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
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
    regions = [list(ranges) for _, ranges in groupby(stored.ranges(), lambda each: each[0])]
    dtypes = {key: tensor.dtype for key, tensor in tensors.items()}
    values = stored.values()
    with closing(DataWriter(folder / _FILE, regions, dtypes, "auto")) as writer:
        for number, ranges in enumerate(regions):
            writer.write_region(number, (next(values).to(dtypes[key]) for key, _, _ in ranges))
        written = writer.finish()
    made = replace(manifest, files={_FILE: written}, tensors=tensors, ranks=())
    (folder / NAME).write_bytes(made.to_json())


def _write_pretrained(stored: StoredCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
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


def _write_dcp(stored: StoredCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes DCP's files into `folder`; `dtype` is that of parameters, states are fp32."""
    # As in open_checkpoint().
    from hetero.checkpoint.dcp.write import DcpWrite

    final = folder.with_name(folder.name.removeprefix(".").removesuffix(".incomplete"))
    write = DcpWrite(folder, stored, dtype)
    write.finish(final, [write.write()])


_Write = Callable[[StoredCheckpoint, Path, "torch.dtype | None"], None]
_WRITERS: dict[str, _Write] = {"hetero": _write_hetero, "hf": _write_pretrained, "dcp": _write_dcp}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    dtype: str | torch.dtype | None = None,
    config: str | os.PathLike[str] | None = None,
    open_source: Callable[[Path], StoredCheckpoint] = open_checkpoint,
) -> StoredCheckpoint:
    """Writes the checkpoint `source`, of any format that `open_source` knows, as `target`.

    Parts of tensors go from file to file: of hetero's and Hugging Face's formats a few MiB are in
    memory, of DCP's and DeepSpeed's one tensor. `target` appears when it is whole and durable.

    Args:
        source: the checkpoint.
        target: its new folder, which must not be there.
        to: "hetero", "hf" (Hugging Face: parameters and buffers alone) or "dcp".
        dtype: of parameters, "fp32", "bf16" or "fp16" (or torch's). Default: as they are stored;
            masters of trained parameters are fp32. A hetero checkpoint's of what is trained is
            fp32 always.
        config: for "hf", a config.json, or a folder with one, that is copied.

    Returns:
        what `source` was, closed.

    Raises:
        ValueError: an option is wrong, or something is at `target`.
        CheckpointError: `source` is no checkpoint, or is damaged.
        StoreError: it cannot be read, or `target` cannot be written; nothing is left of it then.
    """
    if to not in FORMATS:
        raise ValueError(f"to must be one of {', '.join(FORMATS)}, not {to!r}")
    wanted = None if dtype is None else torch_dtype(dtype)
    if config is not None and to != "hf":
        raise ValueError(f"config goes with to='hf', and to is {to!r}")
    config_file = None if config is None else _config_file(Path(config))
    path = Path(os.path.abspath(target))
    if os.path.lexists(path):
        raise ValueError(f"{path} is there already; give another path, or remove it")
    folder = NewFolder(path)
    with open_source(Path(source)) as stored:
        try:
            with folder.as_store_error(f"write {path}"):
                folder.begin()
                _check_space(stored, folder.incomplete, to, wanted)
                _WRITERS[to](stored, folder.incomplete, wanted)
                if config_file is not None:
                    shutil.copyfile(config_file, folder.incomplete / "config.json")
                for each in folder.incomplete.iterdir():
                    sync_path(each)
                folder.complete()
        finally:
            folder.abandon()
    return stored


def _check_space(
    stored: StoredCheckpoint, folder: Path, to: str, dtype: torch.dtype | None
) -> None:
    """Raises StoreError if the tensors that are written have no room, not even in `dtype`."""
    nbytes = 0
    for key, tensor in stored.manifest.tensors.items():
        if to != "hf" or key.startswith("model/"):
            size = tensor.dtype.itemsize
            if dtype is not None and tensor.dtype.is_floating_point:
                size = min(size, dtype.itemsize)
            nbytes += tensor.numel * size
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        text = f"{folder.parent} has {free} bytes free, and the checkpoint's tensors are {nbytes}"
        raise StoreError(errno.ENOSPC, text, str(folder.parent))


def _config_file(path: Path) -> Path:
    found = path / "config.json" if path.is_dir() else path
    if not found.is_file():
        raise ValueError(f"config {found} is no file")
    return found
