"""A managed model saved as torch.distributed.checkpoint does, and loaded from what that has saved.

Each rank writes boxes of its own shards, from their homes, and of replicas each writes some chunks.
DCP's checkpoints have no checksums, random numbers and `extra`: they are for exchange.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hetero.checkpoint.dcp.dcp_checkpoint import DcpCheckpoint
from hetero.checkpoint.dcp.write import DcpWrite
from hetero.checkpoint.engine_checkpoint import EngineCheckpoint
from hetero.checkpoint.load import load_from
from hetero.checkpoint.save import (
    Optimizers,
    begin_saving,
    check_optimizers,
    engine_of_model,
    listed,
)
from hetero.chunks.dtypes import torch_dtype
from offload.disk.new_folder import NewFolder
from offload.interrupts import uninterrupted


@uninterrupted
@torch.no_grad()
def save_dcp(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers = None,
    *,
    dtype: str | torch.dtype = "fp32",
) -> None:
    """Saves a managed model as a checkpoint of torch.distributed.checkpoint (DCP).

    dcp.load() reads it into FSDP2's and plain torch's state dicts, whatever their ranks: the layout
    is {"model": ..., "optim": ...} with what torch's get_state_dict(model, optimizer) gives. All
    ranks must call it, between steps: each writes its own shards, from their homes, a few MiB at a
    time. Names of tied parameters share their bytes.

    It has no random numbers, no loss scale, no `extra` and no checksums: to go on with the same
    bits, use hetero.save().

    Args:
        path: the checkpoint's folder, which must not be there yet, or be empty; all ranks must see
            the same one.
        model: as hetero.initialize() returned it.
        optimizer: likewise, or the list; their states are in fp32, their options in the words of
            torch's optimizers. Default: parameters and buffers alone.
        dtype: of parameters, "fp32" (default: the masters as they are), "bf16" or "fp16" (or
            torch's); buffers keep their own.

    Raises:
        ValueError: something is at `path`, or torch's optimizers have no such option.
        StoreError, NativeIoError: the files cannot be written. Nothing is left then.
        CheckpointError: a rank does not see the folder that the first one has made.
        HeteroError: another rank met one of these.
    """
    engine = engine_of_model(model)
    engine.check_usable()
    optimizers = listed(optimizer)
    check_optimizers(engine, optimizers)
    wanted, folder = torch_dtype(dtype), NewFolder(path)

    def make() -> DcpWrite:
        dtype_of = None if optimizers else lambda _: wanted
        state = EngineCheckpoint(engine, optimizers, dtype_of=dtype_of)
        return DcpWrite(state, wanted, state.rank)

    begin_saving(engine, folder, f"save {folder.path}", make).wait()


@uninterrupted
@torch.no_grad()
def load_dcp(
    path: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizers = None
) -> None:
    """Loads a checkpoint of torch.distributed.checkpoint (DCP) into a managed model.

    It may be of FSDP2, of plain torch, or of save_dcp(), with any number of ranks: the state dicts
    of torch's get_state_dict(model, optimizer) as "model" and "optim" (or "optimizer"), or a
    model's state dict alone. All ranks must call it. Each reads what its shards need, of one chunk
    at a time: beside the budgets that takes up to 12 bytes per element of a chunk, and one chunk
    of the checkpoint's.

    Values become the masters, and parameters their rounding. Options of torch's param groups are
    taken over; what torch has not (bias_correction) stays.

    Its .metadata is a pickle, which torch would run. Here it may name what DCP writes and nothing
    else; options are read as torch.load(weights_only=True) does.

    Args:
        path: the checkpoint's folder.
        model: after hetero.initialize(), with the same parameters.
        optimizer: as hetero.initialize() returned it, or the list. Default: the optimizer's states
            stay, masters excepted.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it names something that DCP
            does not write. If that came late, the model is half loaded, and refuses to be used
            until another checkpoint is loaded.
        ValueError: it is of another model or optimizer. Nothing is changed.
        HeteroError: another rank met one of these.
    """
    engine = engine_of_model(model)
    optimizers = listed(optimizer)
    check_optimizers(engine, optimizers)

    def open_stored() -> DcpCheckpoint:
        return DcpCheckpoint(Path(path), with_optimizer=bool(optimizers))

    load_from(open_stored, engine, optimizers, {}, str(path))
