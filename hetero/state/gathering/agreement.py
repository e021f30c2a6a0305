"""What the ranks of a shard group tell each other about their all-gathers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.ranks.communicator import Communicator
from hetero.state.gathering.agreed_gathers import AgreedGathers
from hetero.state.gathering.agreed_order import from_bytes, to_bytes
from offload.errors import HeteroError


def begin_gathers(gathers: Sequence[AgreedGathers], shard: Communicator) -> None:
    """Expects the order of registration, until a step has been seen. All ranks call it.

    Raises PeerError.
    """
    mine = torch.tensor([(each.slots, each.has_all_in_ram) for each in gathers])
    least = shard.all_gather(mine, "comparing slots").amin(0).tolist()
    for each, (slots, all_in_ram) in zip(gathers, least, strict=True):
        each.begin(slots, bool(all_in_ram))


def agree_on_gathers(
    gathers: Sequence[AgreedGathers], shard: Communicator, ends_step: bool, what: str
) -> None:
    """Until all ranks have made the same all-gathers, and none is under way. All ranks call it.

    Args:
        gathers: those of each chunk group, in the same order on all ranks.
        shard: the ranks of the shard group.
        ends_step: what comes is another step, in the order that the ranks then agree on.
        what: names the call in errors.

    Raises:
        PeerError: another rank failed, or did not come.
        HeteroError: the ranks have gathered different chunks, so what they computed is wrong.
    """
    mine = [each.step_record() for each in gathers]
    numbers = torch.tensor([record.numbers for record in mine])
    told = shard.all_gather(numbers, what)  # ranks, chunk groups, numbers
    for each, started in zip(gathers, told[:, :, 0].amax(0).tolist(), strict=True):
        each.level(started)
    digests = torch.tensor([each.digest() for each in gathers])
    if not shard.are_same(digests, what):
        raise HeteroError(
            "the ranks have gathered different chunks, or different versions of them, since the "
            "last step, so gradients may be wrong; this is a defect of hetero, please report it"
        )
    for each in gathers:
        each.finish()
    if not ends_step:
        return
    for number, (each, record) in enumerate(zip(gathers, mine, strict=True)):
        records = [record.uses]
        if told[:, number, 1].ne(told[0, number, 1]).any():
            found = shard.all_gather_bytes(to_bytes(record.uses), what)
            records = [from_bytes(content) for content in found]
        each.end_step(records, int(told[:, number, 2].min()))
