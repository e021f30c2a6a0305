"""Opens a checkpoint in any format, and converts it to another one, without a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from hetero.checkpoint.checkpoint_write import CheckpointWrite, HeteroWrite
from hetero.checkpoint.dcp.metadata import METADATA_NAME as DCP_NAME
from hetero.checkpoint.deepspeed_checkpoint import DeepspeedCheckpoint, universal_folder
from hetero.checkpoint.folder import find_checkpoint, is_checkpoint
from hetero.checkpoint.hetero_checkpoint import HeteroCheckpoint
from hetero.checkpoint.manifest import master_key
from hetero.checkpoint.pretrained.safetensors_checkpoint import (
    INDEX_NAME,
    WEIGHTS_NAME,
    SafetensorsCheckpoint,
)
from hetero.checkpoint.pretrained.weight_files import PretrainedWrite
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.chunks.dtypes import torch_dtype
from offload.disk.new_folder import NewFolder
from offload.errors import CheckpointError

_INCOMPLETE = re.compile(r"\.(.+)\.incomplete")
FORMATS = ("hetero", "hf", "dcp")
_MOST_BYTES = 5 << 30  # of tensors in a file of Hugging Face's, as save_pretrained() has it


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """What is at `path`, for reading; in a folder of hetero checkpoints the latest one.

    Raises:
        CheckpointError: it is none of the formats that are known, is damaged, or is what a save
            has left that did not end.
        StoreError: it cannot be read.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(
                f"{path} is a file, and no .safetensors; give a checkpoint's folder, or such a file"
            )
        return SafetensorsCheckpoint(path)
    if not path.exists():
        beside = path.with_name(f".{path.name}.incomplete")
        if beside.is_dir():
            raise CheckpointError(
                f"there is no {path}; {beside} is next to it, from a save that is still under way "
                f"or did not end"
            )
        raise CheckpointError(f"there is no {path}")
    incomplete = _INCOMPLETE.fullmatch(path.resolve().name)
    if incomplete is not None:
        nbytes = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
        raise CheckpointError(
            f"{path} is an incomplete checkpoint, with {nbytes} bytes so far: of a save to "
            f"{path.with_name(incomplete[1])} that is still under way, or did not end; the next "
            f"save there removes it"
        )
    if is_checkpoint(path):
        return HeteroCheckpoint(path)
    if (path / DCP_NAME).is_file():
        # It takes torch.distributed.checkpoint, whose import is slow.
        from hetero.checkpoint.dcp.dcp_checkpoint import DcpCheckpoint

        return DcpCheckpoint(path)
    if (path / WEIGHTS_NAME).exists() or (path / INDEX_NAME).exists():
        return SafetensorsCheckpoint(path)
    universal = universal_folder(path)
    if universal is not None:
        return DeepspeedCheckpoint(path, universal)
    try:
        found = find_checkpoint(path)
    except CheckpointError:
        raise CheckpointError(
            f"{path} is no checkpoint: it has no manifest.json (hetero), {WEIGHTS_NAME} or "
            f"{INDEX_NAME} (Hugging Face), {DCP_NAME} (torch.distributed.checkpoint) or "
            f"zero/NAME/fp32.pt (DeepSpeed's universal format), and no hetero checkpoints in it"
        ) from None
    return HeteroCheckpoint(found)


def _make_write(
    stored: StoredCheckpoint, to: str, dtype: torch.dtype | None, config: Path | None
) -> CheckpointWrite:
    if to == "hetero":
        return HeteroWrite.of_stored(stored, dtype)
    if to == "hf":
        # (Tied parameters have their first name alone, as from_pretrained() wants it.)
        names = (*stored.manifest.params, *stored.manifest.buffers)
        keys = {name: master_key(name) for name in names}
        others = {} if config is None else {"config.json": config.read_bytes()}
        return PretrainedWrite(stored, keys, _MOST_BYTES, dtype, others=others)
    # (As in open_checkpoint().)
    from hetero.checkpoint.dcp.write import DcpWrite

    return DcpWrite(stored, dtype)


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
                write = _make_write(stored, to, wanted, config_file)
                write.finish(folder, [write.write(folder.incomplete)])
                folder.complete()
        finally:
            folder.abandon()
    return stored


def _config_file(path: Path) -> Path:
    found = path / "config.json" if path.is_dir() else path
    if not found.is_file():
        raise ValueError(f"config {found} is no file")
    return found
