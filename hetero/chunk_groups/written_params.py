"""What user code writes to a parameter outside of hetero.gathered(modifier_rank=...).

The parameter becomes what was written. Its master keeps the bits below the compute dtype, because
nobody can tell any more which elements were written (with fp16, whose master is whole, those are
written that the master does not round to). gathered(modifier_rank=...) tells them apart.
"""

from __future__ import annotations

import torch

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import parts_of


def keep_written(
    chunk_group: ChunkGroup, managed: ManagedParam, values: torch.Tensor | None
) -> None:
    """Makes `values` those of the parameter; None: they are at home already. For one rank.

    Raises what bringing them home raises.
    """
    if values is not None:
        chunk_group.params.keep_written(managed, values)
    else:
        chunk_group.updates.versions.begin_write(managed.chunk)
    if values is not None:
        with chunk_group.optim_states.lock:  # the pipeline may keep the parameter, too
            chunk_group.memory.arenas.forget_read_ahead()
    if chunk_group.dtypes.compute == "fp16" and managed.chunk.trainable:
        with chunk_group.params.shard(managed.chunk) as shard:
            _write_masters(chunk_group, managed, shard)
    managed.note_change()


def _write_masters(chunk_group: ChunkGroup, managed: ManagedParam, shard: torch.Tensor) -> None:
    tile_numel = chunk_group.layout.tile_numel
    for part in parts_of(managed, chunk_group.layout):
        with chunk_group.optim_states.open(managed.chunk, part.tile, write=True) as optim_state:
            assert optim_state is not None
            assert optim_state.master is not None
            master = optim_state.master[part.in_tile]
            values = shard[part.tile * tile_numel :][part.in_tile].to(master.device)
            written = master.to(values.dtype) != values
            master[written] = values[written].float()
