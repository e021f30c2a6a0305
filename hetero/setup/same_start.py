"""All ranks begin with the same model.

Every rank runs the same initialisation with its own random numbers, as under DDP, and goes on with
them. Checksums of the values are compared, and where they differ the first rank's count.
"""

from __future__ import annotations

import zlib

import torch

from hetero.planning.group_plans import Arrangement
from hetero.setup.construction import ConstructionArena
from hetero.setup.construction_store import take_from_first
from hetero.stand_ins.construction_uses import written_to
from hetero.stand_ins.parameter_classes import memory_in


def start_alike(
    model: torch.nn.Module, arrangement: Arrangement, construction: ConstructionArena
) -> None:
    """Makes parameters and buffers those of the first rank, where they differ. All ranks call it.

    Raises:
        HeteroError: the ranks' models or options differ; it names the first difference.
    """
    everyone = construction.world.everyone
    if everyone is None:
        return
    facts = {
        name: f"{tuple(p.shape)} {p.dtype}, requires_grad={p.requires_grad}"
        for name, p in model.named_parameters()
    }
    facts |= {f"buffer {name}": f"{tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()}
    facts |= {
        f"option {key}": str(value)
        for key, value in vars(construction.config).items()
        if key != "nvme_path"
    }
    facts["offloaded parameters"] = str(sum(map(construction.is_offloaded, model.parameters())))
    layouts = [plan.layout for plan in arrangement.chunk_groups]
    facts["slot_numel"] = str([layout.slot_numel for layout in layouts])
    facts["trained"] = str([[c.trainable for c in layout.chunks] for layout in layouts])
    construction.world.require_equal(facts, "the models or options")
    require_same_writes(model, construction)
    # An offloaded parameter is made of all ranks' parts, and so the same everywhere.
    params = [p for p in model.parameters() if p.numel() and not construction.is_offloaded(p)]
    sums = torch.tensor([_checksum(p, construction) for p in params], dtype=torch.int64)
    found = everyone.all_gather(sums, "the comparison of first values")
    differs = found.ne(found[0]).any(dim=0)
    for param, different in zip(params, differs.tolist(), strict=True):
        if different:
            take_from_first(memory_in(param), everyone)
    for buffer in model.buffers():
        if buffer.numel():
            take_from_first(buffer, everyone)


def require_same_writes(model: torch.nn.Module, construction: ConstructionArena) -> None:
    """Compares what ranks have written inside gathered() without a modifier_rank; all call it.

    Raises HeteroError if it differs: the first rank's values would count, or parts of each rank's.
    """
    written = {name: f"{written_to(p):08x}" for name, p in model.named_parameters()}
    construction.world.require_equal(
        {f"the checksum of {name}": checksum for name, checksum in written.items()},
        "values that were written inside gathered() without a modifier_rank (00000000: none were)",
        "name the rank whose values count as modifier_rank, or write the same on all ranks",
    )


def _checksum(param: torch.nn.Parameter, construction: ConstructionArena) -> int:
    """CRC-32 of the whole parameter's values in fp32."""
    total = 0
    for _, block in construction.blocks(param, slice(0, param.numel())):
        total = zlib.crc32(block.contiguous().view(torch.uint8).numpy().data, total)
    return total
