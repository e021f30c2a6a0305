"""What one rank does for a chunk does not depend on the number of ranks: calls and bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hetero
from hetero.ranks.communicator import _PIECE_BYTES
from hetero.ranks.peers import Channel
from tests.support.gathering.fake_world import Counts, fake_world

WIDTH = 1024
CHUNKS = 3
LAYERS = 2 * CHUNKS  # 512 shards of whole pages take two
CHUNK_BYTES = 2 * WIDTH * WIDTH * 2


def calls_of_a_step(ranks: int, stage: int, micro_batches: int) -> tuple[Counts, int]:
    """What the third step of a model calls, two of whose layers are a chunk; and its gathers."""
    with fake_world(ranks) as counts:
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        optimizer = hetero.HybridAdam(model.parameters(), lr=1e-3)
        model, optimizer = hetero.initialize(
            model, optimizer, dtype="bf16", placement_policy="cpu", zero_stage=stage,
            chunk_numel=2 * WIDTH * WIDTH, host_memory="200MiB", debug={"overlap_updates": "none"},
        )  # fmt: skip
        engine = optimizer.engine
        gathering = engine.chunk_groups[0].ranks.gathering
        assert gathering is not None
        for step in range(3):
            if step == 2:
                gathers = gathering.counts.started
                counts.reset()
            for _ in range(micro_batches):
                model(torch.randn(2, WIDTH)).square().mean().backward()
            engine.grad_norm(model.parameters())  # (of what no other rank has sent)
            optimizer.step()
            optimizer.zero_grad()
        gathers = gathering.counts.started - gathers
        messages = counts.messages
        engine.close()
        counts.messages = messages
    return counts, gathers


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_calls_and_bytes_are_the_same_for_any_number_of_ranks(stage: int) -> None:
    """No message goes from rank to rank, and bytes are what an all-gather and a mean need."""
    found = {ranks: calls_of_a_step(ranks, stage, 2) for ranks in (2, 512)}
    means = CHUNKS * (1 if stage == 1 else 2)  # stage 1 adds up micro-batches
    # They meet with their shards; where some are not in RAM, also before they open them.
    meetings, pieces = 1 + int(stage < 3), -(-CHUNK_BYTES // _PIECE_BYTES)
    for ranks, (counts, gathers) in found.items():
        assert gathers == (CHUNKS if stage < 3 else found[2][1])
        assert counts.messages == 0
        # An all-to-all is two calls: what is for higher ranks, and what is for lower ones.
        assert counts.calls[Channel.GRADIENTS] == 2 * means
        assert counts.calls[Channel.GATHERS] == gathers * (meetings + 2 * pieces)
        sent = CHUNK_BYTES * (ranks - 1) // ranks
        assert counts.nbytes[Channel.GRADIENTS] == means * sent
        assert counts.nbytes[Channel.GATHERS] == gathers * (meetings + sent)
