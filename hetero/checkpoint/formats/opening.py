"""Opens a checkpoint, whichever format it has."""

from __future__ import annotations

import re
from pathlib import Path

from hetero.checkpoint.dcp.boxes import METADATA_NAME as DCP_NAME
from hetero.checkpoint.folder import find_checkpoint, is_checkpoint
from hetero.checkpoint.formats.deepspeed_format import DeepspeedCheckpoint, universal_folder
from hetero.checkpoint.hetero_checkpoint import HeteroCheckpoint
from hetero.checkpoint.pretrained.safetensors_checkpoint import (
    INDEX_NAME,
    WEIGHTS_NAME,
    SafetensorsCheckpoint,
)
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from offload.errors import CheckpointError

_INCOMPLETE = re.compile(r"\.(.+)\.incomplete")


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
