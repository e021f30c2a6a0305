"""Other threads that read a chunk, for other ranks, just as backward begins to update it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import hetero
from hetero.chunks.layout import Chunk
from hetero.state.chunk_access import ParamUpdates
from tests.support.ranks import overlapping
from tests.support.ranks.processes import RankPool
from tests.support.training.overlap_net import STEPS, Begun, assert_same_bits, loss_of


@pytest.mark.parametrize("host_memory", ["700KiB", pytest.param("1MiB", marks=pytest.mark.extra)])
def test_between_the_decision_and_the_submission(
    ranks2: RankPool, host_memory: str, tmp_path: Path
) -> None:
    """The update is taken back whole: it is not made twice, nor from what was never saved.

    Parameters are in RAM, or on NVMe.
    """
    options = {
        "zero_stage": 3,
        "placement_policy": "nvme",
        "nvme_path": str(tmp_path),
        "host_memory": host_memory,
    }
    wanted, found = (
        ranks2.run(
            overlapping.read_while_submitting, options | {"debug": {"overlap_updates": setting}}
        )
        for setting in ("none", "backward")
    )
    for (saw, masters), (_, right) in zip(found, wanted, strict=True):
        assert len(saw) > 2
        assert all(saw)
        assert all(map(torch.equal, masters, right))


def test_a_reader_that_has_begun_sees_no_update(tmp_path: Path) -> None:
    """It came when the update was prepared, and is not through when that would be submitted."""
    begin_now = ParamUpdates.begin_speculation

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> list[torch.Tensor]:
        begun, (chunk_group,) = Begun(optimizer), optimizer.engine.chunk_groups
        shards, left = chunk_group.params.copies.shards, 0
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def open_shard(opened: ExitStack, chunk: Chunk) -> None:
            shard = opened.enter_context(shards.open(chunk))
            copies.append((shard, shard.clone()))

        for step in range(STEPS):
            loss = loss_of(model, step)
            with ExitStack() as opened:

                def begin(
                    updates: ParamUpdates, chunk: Chunk, members: Any, opened: ExitStack = opened
                ) -> bool:
                    begins = begin_now(updates, chunk, members)
                    thread = threading.Thread(target=open_shard, args=(opened, chunk))
                    thread.start()
                    thread.join()
                    return begins

                with patch.object(ParamUpdates, "begin_speculation", begin):
                    loss.backward()
                assert begun.now == 0
                chunk_group.updates.wait_all_computed()
                assert all(torch.equal(shard, copy) for shard, copy in copies)
                left += len(copies)
                copies.clear()
            optimizer.step()
            optimizer.zero_grad()
        assert overlap == "none" or left > STEPS
        return []

    assert_same_bits(tmp_path, "optim_states", ["backward"], loop)


def test_a_reader_that_comes_later_sees_the_values_of_before(tmp_path: Path) -> None:
    """Updates were made during backward; each is taken back before its chunk is read."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> list[torch.Tensor]:
        (chunk_group,) = optimizer.engine.chunk_groups
        read = 0
        for step in range(STEPS):
            before = hetero.masters(model.parameters())
            kept = [value.bfloat16().flatten() for value in before]
            loss_of(model, step).backward()
            chunk_group.updates.wait_all_computed()
            speculative = [state.chunk for state in chunk_group.updates.speculative]
            for chunk in speculative:
                with chunk_group.params.copies.shards.open(chunk) as shard:
                    for m in chunk_group.updates.chunks[chunk.id].members:
                        assert any(torch.equal(m.part_of(shard).flatten(), each) for each in kept)
            read += len(speculative)
            optimizer.step()
            optimizer.zero_grad()
        assert overlap == "none" or read > 0
        return []

    assert_same_bits(tmp_path, "optim_states", ["backward"], loop)
