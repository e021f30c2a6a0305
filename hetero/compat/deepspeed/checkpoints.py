"""Checkpoints of a DeepSpeedEngine: its methods, and the fp32 weights without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hetero.checkpoint.formats import open_checkpoint
from hetero.checkpoint.load import load
from hetero.checkpoint.manifest import master_key
from hetero.checkpoint.save import save
from hetero.compat.key_table import log_given, logger
from hetero.compat.ranks import barrier, rank
from offload.errors import CheckpointError

_LATEST = "latest"  # the file in a folder of checkpoints that names the last one
COUNTS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")  # of the engine


def save_checkpoint(
    engine: Any,
    save_dir: str | Path,
    tag: str | int | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Saves a checkpoint of hetero's in save_dir/tag, and raises as hetero.save(); all call it.

    The `tag` is by default "global_step" and the number of steps; with `save_latest` the file
    "latest" in save_dir names it afterwards. `client_state` has plain values of the loop's own.
    """
    reason = "they have no states"
    log_given("save_checkpoint", reason, exclude_frozen_parameters=exclude_frozen_parameters)
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    extra: dict[str, Any] = {
        "client_state": dict(client_state or {}),
        "counts": {count: getattr(engine, count) for count in COUNTS},
        "loss_scale": engine._scaled_steps.scale.state_dict(),
    }
    if engine.lr_scheduler is not None:
        extra["scheduler"] = engine.lr_scheduler
    save(Path(save_dir) / name, engine.module, engine._optimizer, extra=extra)
    if save_latest and rank() == 0:
        new = Path(save_dir) / f"{_LATEST}.new"
        new.write_text(name)
        new.replace(Path(save_dir) / _LATEST)  # at once: a crash leaves one of the two names
    barrier()
    return True


def load_checkpoint(
    engine: Any,
    load_dir: str | Path,
    tag: str | int | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str | None, dict[str, Any] | None]:
    """Goes on from a checkpoint of save_checkpoint(), with any number of ranks; all call it.

    The `tag` is by default the one that the file "latest" in load_dir names. Beside parameters the
    states of the optimizer, the loss scale and random numbers are loaded, and the scheduler's,
    unless the arguments leave them out.

    Returns:
        The checkpoint's path and its client_state; (None, None) if there is none.

    Raises:
        ValueError: load_module_strict=False; or as hetero.load().
        Exception: as hetero.load().
    """
    if not load_module_strict:
        raise ValueError(
            "load_module_strict=False loads a part of a model; use "
            "module.load_state_dict(..., strict=False)"
        )
    folder = Path(load_dir)
    if tag is None:
        if not (folder / _LATEST).is_file():
            logger.warning("%s has no file %r, so nothing is loaded", folder, _LATEST)
            return None, None
        tag = (folder / _LATEST).read_text().strip()
    path = folder / str(tag)
    with_states = load_optimizer_states and not load_module_only
    with_scheduler = load_lr_scheduler_states and not load_module_only
    extra: dict[str, Any] = {"loss_scale": engine._scaled_steps.scale} if with_states else {}
    if with_scheduler and engine.lr_scheduler is not None:
        extra["scheduler"] = engine.lr_scheduler
    found = load(path, engine.module, engine._optimizer if with_states else None, extra=extra)
    if "client_state" not in found.extra:
        raise CheckpointError(f"{path} was not saved by save_checkpoint(); use hetero.load()")
    if not load_module_only:
        for name, count in found.extra["counts"].items():
            setattr(engine, name, count)
    return str(path), dict(found.extra["client_state"])


def save_16bit_model(
    engine: Any, save_dir: str | Path, save_filename: str = "pytorch_model.bin"
) -> bool:
    """Saves the model's whole state_dict() in its compute dtype; all ranks call it.

    The folder is made if it does not exist; torch.load() reads the file.
    """
    if rank() == 0:
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        torch.save(engine.module.state_dict(), Path(save_dir) / save_filename)
    barrier()
    return True


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """The masters of a checkpoint of engine.save_checkpoint(), and its buffers, by name.

    `hetero convert` writes them without having all in RAM. The `tag` is by default the one that the
    file "latest" names. Raises CheckpointError or StoreError if it cannot be read.
    """
    folder = Path(checkpoint_dir)
    if tag is None:
        tag = (folder / _LATEST).read_text().strip()
    found: dict[str, torch.Tensor] = {}
    with open_checkpoint(folder / tag) as stored:
        manifest = stored.manifest
        for name in (*manifest.params, *manifest.buffers):
            record = manifest.params.get(name)
            if exclude_frozen_parameters and record is not None and not record.trained:
                continue
            values = stored.whole(master_key(name))
            found[name] = values.to(values.dtype if record is None else torch.float32, copy=True)
            for alias in () if record is None else record.aliases:
                found[alias] = found[name]
    return found


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> torch.nn.Module:
    """Loads the masters of a checkpoint into a plain model, which is returned."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag))
    return model
