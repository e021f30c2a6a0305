"""Which GPU a rank computes on."""

from __future__ import annotations

import pytest
import torch

from offload.device.cuda_runtime import choose_gpu


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
