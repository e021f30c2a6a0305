"""Which GPU a rank computes on, and its streams."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from typing import Any

import pytest
import torch

from offload.device.cuda_runtime import CudaRuntime, choose_gpu


@pytest.mark.parametrize(
    ("local_rank", "current", "chosen"),
    [(None, 0, 0), ("0", 0, 0), ("1", 0, 1), ("5", 0, 1), ("1", 3, 3)],
    ids=["alone", "first", "second", "more-ranks-than-gpus", "chosen-by-the-program"],
)
def test_a_ranks_gpu(
    local_rank: str | None, current: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [current]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: now.__setitem__(0, index))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    choose_gpu()
    assert now == [chosen]


def test_streams_that_come_while_others_are_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a thread that closes an arena does it while another one makes a backend."""
    came: list[Any] = []

    class Stream:
        def __init__(self, handle: int, device: torch.device) -> None:
            self.handle = handle

        def __hash__(self) -> int:
            if going_through and not came:
                thread = threading.Thread(target=lambda: came.append(runtime.new_stream()))
                thread.start()
                thread.join()
            return self.handle

    handles, going_through = itertools.count(1), False
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr("offload.device.cuda_runtime.create_stream", lambda _: next(handles))
    monkeypatch.setattr("offload.device.cuda_runtime._UNUSED_STREAMS", defaultdict(deque))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    runtime = CudaRuntime()
    streams = [runtime.new_stream() for _ in range(3)]
    going_through = True
    assert set(runtime.streams) == set(streams)
    assert came
    del streams[0]
    assert {stream.handle for stream in runtime.streams} == {2, 3, 4}
    assert runtime.new_stream().handle == 1, "the handle of a stream that is gone is used again"
