"""offload/timeline: what torch's profiler shows of hetero, and nothing without it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler

from offload.timeline import mark, marked
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import batches, build

pytestmark = pytest.mark.usefixtures("nothing_left")


def profiled_steps(**options: Any) -> Counter[str]:
    """How often torch's profiler saw each of hetero's marks in two steps."""
    model, optimizer = build(dtype="fp32", chunk_numel=4096, **options)

    def step() -> None:
        (tokens,) = batches(1)
        optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
        step()
    optimizer.engine.close()
    events = profile.events()
    assert events is not None
    return Counter(event.name for event in events if event.name.startswith("hetero::"))


def test_gathers_and_updates_are_marked(tmp_path: Path) -> None:
    seen = profiled_steps(
        placement_policy="nvme",
        host_memory="300KiB",
        nvme_path=str(tmp_path),
        debug={"overlap_updates": "none"},
    )
    assert seen["hetero::gather"] > 2
    assert seen["hetero::update"] == 2
    assert not seen["hetero::reduce"]


def on_ranks(rank: int, world: int) -> Counter[str]:
    return profiled_steps(placement_policy="cpu")


def test_means_over_ranks_are_marked(ranks2: RankPool) -> None:
    for seen in ranks2.run(on_ranks):
        assert seen["hetero::reduce"] == seen["hetero::wait_reduce"] > 2
        assert seen["hetero::gather"] > 2


def test_without_a_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(profiler, "record_function", Recorded)

    @marked("hetero::double")
    def double(number: int) -> int:
        return 2 * number

    with mark("hetero::block"):
        assert double(number=3) == 6
    assert not entered
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    with mark("hetero::block"):
        assert double(3) == 6
    assert entered == ["hetero::block", "hetero::double"]
