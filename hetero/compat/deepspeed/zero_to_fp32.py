"""deepspeed.utils.zero_to_fp32: the fp32 weights of a checkpoint, without an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from hetero.checkpoint.formats.opening import open_checkpoint
from hetero.checkpoint.model_tensors import master_key


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """The masters of a checkpoint of engine.save_checkpoint(), and its buffers, by name.

    `hetero convert` writes them without having all in RAM.

    Args:
        checkpoint_dir: the folder of checkpoints.
        tag: the checkpoint's name. Default: the one that the file "latest" names.
        exclude_frozen_parameters: those that are trained alone.

    Raises:
        CheckpointError, StoreError: it cannot be read.
    """
    folder = Path(checkpoint_dir)
    if tag is None:
        tag = (folder / "latest").read_text().strip()
    found: dict[str, torch.Tensor] = {}
    with open_checkpoint(folder / tag) as stored:
        manifest = stored.manifest
        for name in (*manifest.params, *manifest.buffers):
            record = manifest.params.get(name)
            if exclude_frozen_parameters and record is not None and not record.trained:
                continue
            tensor = manifest.tensors[master_key(name)]
            parts = list(stored.parts(master_key(name))) or [torch.empty(0, dtype=tensor.dtype)]
            values = torch.cat(parts).view(tensor.shape)
            found[name] = values if record is None else values.float()
            for alias in () if record is None else record.aliases:
                found[alias] = found[name]
    return found


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> torch.nn.Module:
    """Loads the masters of a checkpoint into a plain model, which is returned."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag))
    return model
