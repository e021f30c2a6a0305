"""Gathers that all ranks make, and that a rank has begun and not started: their order."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.chunks.layout import Chunk
from hetero.ranks.collectives import GatheredParts
from hetero.state.gathering.all_gather import Gathering


class Stream:
    """Notes what is started."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def start(self, chunk: Chunk) -> Any:
        self.started.append(chunk.id)
        return SimpleNamespace()


@pytest.fixture
def gathering() -> Gathering:
    nothing: Any = None
    layout: Any = SimpleNamespace(chunks=[SimpleNamespace(id=number) for number in range(4)])
    stream: Any = Stream()
    return Gathering(layout, nothing, nothing, stream, nothing, nothing)


def in_thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def chunk(gathering: Gathering, number: int) -> Chunk:
    return gathering._layout.chunks[number]


def test_a_rank_takes_part_after_what_it_has_begun(gathering: Gathering) -> None:
    assert gathering.take_part(chunk(gathering, 0), must=False)
    assert gathering.expect(1, must=False)
    assert not gathering.take_part(chunk(gathering, 2), must=False)
    thread = in_thread(lambda: gathering.take_part(chunk(gathering, 2), must=True))
    gathering.leave_out(1)
    thread.join(60)
    assert gathering.stream.started == [0, 1, 2]


def test_a_chunk_is_expected_again_when_the_gather_before_is_started(gathering: Gathering) -> None:
    assert gathering.expect(1, must=False)
    assert not gathering.expect(1, must=False)
    thread = in_thread(lambda: gathering.expect(1, must=True))
    gathering.leave_out(1)
    thread.join(60)
    assert gathering.is_common(1)
    assert gathering.stream.started == [1]
    gathering.leave_out(1)
    assert gathering.stream.started == [1, 1]
    gathering.leave_out(1)  # which nobody expects
    assert gathering.stream.started == [1, 1]


def test_memory_that_was_let_go_is_not_written_to() -> None:
    whole = torch.zeros(8, dtype=torch.uint8)
    parts = GatheredParts(whole, 2)
    parts.store(0, torch.ones(2, 2, dtype=torch.uint8))
    assert parts.let_go()
    parts.store(2, torch.ones(2, 2, dtype=torch.uint8))
    assert whole.view(2, 4).tolist() == [[1, 1, 0, 0]] * 2


def test_what_could_not_begin_is_not_waited_for(gathering: Gathering) -> None:
    assert gathering.expect(1, must=True)
    gathering.forget_expected(1)
    assert gathering.take_part(chunk(gathering, 3), must=False)
    assert gathering.stream.started == [3]
