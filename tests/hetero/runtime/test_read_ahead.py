"""What step() needs first is read while backward runs, once, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hetero
from hetero.overlap import STREAMING_BUFFERS
from tests.support.training.loops import same
from tests.support.training.overlap_net import (
    Net,
    build,
    loss_of,
    one_step,
    result,
)
from tests.support.waiting import until


def tile_bytes(optimizer: hetero.HybridAdam) -> int:
    """Of an optimizer state; PARAM is in RAM."""
    engine = optimizer.engine
    return engine.chunk_groups[0].dtypes.optim_state_bytes(engine.layout.tile_numel)


def test_steps_find_what_was_read(tmp_path: Path) -> None:
    """As many optimizer states as there are buffers; a further micro-batch reads nothing."""
    model, optimizer = build(Net, tmp_path, "optim_states", "none")
    pipeline = optimizer.engine.chunk_groups[0].pipeline
    buffers, each = optimizer.engine.placement.buffers, tile_bytes(optimizer)
    optim_states = len(optimizer.engine.layout.chunks)
    assert 2 < buffers < optim_states
    waited = []

    def wait(grad: torch.Tensor) -> None:
        """By the last node of backward."""
        until(lambda: pipeline.stats["read_bytes"] == buffers * each)
        waited.append(True)

    def watch(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].register_hook(wait)

    handle = model.blocks[0].register_forward_pre_hook(watch)
    for _ in range(3):
        loss_of(model, 0).backward()
    handle.remove()
    assert len(waited) == 3
    optimizer.step()
    optimizer.zero_grad()
    assert pipeline.stats["ahead"] == buffers
    assert pipeline.stats["read_bytes"] == optim_states * each
    # From now on buffers keep what the next step needs first.
    for step in range(1, 4):
        before = pipeline.stats["read_bytes"]
        loss_of(model, step).backward()
        assert pipeline.stats["read_bytes"] == before
        optimizer.step()
        optimizer.zero_grad()
        assert pipeline.stats["read_bytes"] == before + (optim_states - buffers) * each
    assert pipeline.stats["ahead"] == buffers
    assert pipeline.stats["hits"] == 3 * buffers
    # A checkpoint goes through the buffers; the next backward fills them again.
    optimizer.state_dict()
    before = pipeline.stats["read_bytes"]
    loss_of(model, 4).backward()
    until(lambda: pipeline.stats["read_bytes"] == before + buffers * each)
    optimizer.step()
    assert pipeline.stats["ahead"] == 2 * buffers
    optimizer.engine.close()


def test_without_prefetch_nothing_is_read(tmp_path: Path) -> None:
    model, optimizer = build(Net, tmp_path, "optim_states", "none", debug={"prefetch": False})
    loss_of(model, 0).backward()
    optimizer.step()  # which would use what had been read before it
    assert optimizer.engine.chunk_groups[0].pipeline.stats["ahead"] == 0
    optimizer.engine.close()


def write(model: Any) -> None:
    with hetero.gathered(model.inner.weight, modifier_rank=0), torch.no_grad():
        model.inner.weight.mul_(0.5)


INSTEAD: list[Callable[[Any, hetero.HybridAdam, Any], object]] = [
    lambda model, optimizer, saved: optimizer.zero_grad(),
    lambda model, optimizer, saved: optimizer.state_dict(),
    lambda model, optimizer, saved: optimizer.load_state_dict(saved),
    lambda model, optimizer, saved: hetero.masters(model.parameters()),
    lambda model, optimizer, saved: write(model),
]


def test_what_is_read_need_not_be_used(tmp_path: Path) -> None:
    """Nobody has to wait, and values that come from elsewhere are not hidden by what was read."""
    results = []
    for prefetch in (False, True):
        model, optimizer = build(
            Net, tmp_path, "optim_states", "none", debug={"prefetch": prefetch}
        )
        for number, do in enumerate(INSTEAD):
            one_step(model, optimizer, 10 * number)
            saved = optimizer.state_dict()
            one_step(model, optimizer, 10 * number + 1)
            loss_of(model, 10 * number + 2).backward()
            do(model, optimizer, saved)
            one_step(model, optimizer, 10 * number + 3)
        results.append(result(model, optimizer))
    assert same(*results)


def test_updates_in_backward_keep_most_buffers(tmp_path: Path) -> None:
    """All but some buffers keep the order's end, which is neither read nor written."""
    model, optimizer = build(
        lambda: Net(blocks=8), tmp_path, "optim_states", "backward", host_memory="2MiB"
    )
    pipeline, buffers = (
        optimizer.engine.chunk_groups[0].pipeline,
        optimizer.engine.placement.buffers,
    )
    optim_states = len(optimizer.engine.layout.chunks)
    lacking = optim_states - buffers
    assert buffers > STREAMING_BUFFERS + 1
    assert lacking > STREAMING_BUFFERS
    for step in range(6):
        before = dict(pipeline.stats)
        loss_of(model, step).backward()
        # What has not begun when step() comes is taken back: no old parameters of it are written,
        # and its optimizer state may stay in a buffer, to be written in the next backward.
        pipeline.wait_updated()
        optimizer.step()
        optimizer.zero_grad()
        pipeline.wait_written()
        if step < 2:  # the first one learns which gradients come, the second one keeps the end
            continue
        missed = (lacking + STREAMING_BUFFERS) * tile_bytes(optimizer)
        written = pipeline.stats["written_bytes"] - before["written_bytes"]
        old_params = (lacking + STREAMING_BUFFERS) * optimizer.engine.layout.tile_numel * 2
        assert written == missed + old_params
        # What streamed through last may still be there.
        read = pipeline.stats["read_bytes"] - before["read_bytes"]
        assert missed - STREAMING_BUFFERS * tile_bytes(optimizer) <= read <= missed
    optimizer.engine.close()
