"""Loading what torch.distributed.checkpoint has saved, of FSDP2, of plain torch or of hetero."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hetero.checkpoint.dcp.dcp_checkpoint import DcpCheckpoint
from hetero.checkpoint.load import load_from
from hetero.checkpoint.save import Optimizers, check_optimizers, engine_of_model, listed
from offload.interrupts import uninterrupted


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
