"""join_ranks(): what a training's first call does to its process, and what does not."""

import pytest
import torch.distributed as dist

from hetero import Config
from hetero.ranks.process_groups import ProcessGroups
from hetero.setup import initialize as module


def test_making_the_ranks_joins_no_group_and_sets_no_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", _refuse)
    monkeypatch.setattr("offload._native.set_threads", _refuse)
    assert ProcessGroups(1.0).size == 1


def test_a_launched_rank_joins_and_shares_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    shared: list[int] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", joined.append)
    monkeypatch.setattr(module, "share_threads", shared.append)
    module.join_ranks(lambda: Config(placement_policy="cpu"))
    assert joined == ["gloo"]
    assert shared == [1]


def _refuse(*_: object) -> None:
    raise AssertionError("the process was changed")
