"""Converts a checkpoint to another format, a tensor's part at a time, without a model."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from hetero.checkpoint.dcp.part import dcp_part
from hetero.checkpoint.dcp.write import DcpWrite
from hetero.checkpoint.formats.opening import open_checkpoint
from hetero.checkpoint.formats.write_hetero import write_hetero
from hetero.checkpoint.formats.write_pretrained import write_pretrained
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.chunks.dtypes import torch_dtype
from offload.disk.durable import sync_path
from offload.disk.new_folder import NewFolder
from offload.errors import StoreError


def _write_dcp(stored: StoredCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes DCP's files into `folder`; `dtype` is that of parameters, states are fp32."""
    final = folder.with_name(folder.name.removeprefix(".").removesuffix(".incomplete"))
    write = DcpWrite(folder, final, dcp_part(stored, dtype), 0)
    write.finish([write.write([write.plan()])])


FORMATS = ("hetero", "hf", "dcp")
_Write = Callable[[StoredCheckpoint, Path, "torch.dtype | None"], None]
_WRITERS: dict[str, _Write] = {
    "hetero": write_hetero,
    "hf": write_pretrained,
    "dcp": _write_dcp,
}


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
