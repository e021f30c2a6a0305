"""hetero/ranks/process_groups: which ranks share a model's state, and why one of them ends."""

import sys

import pytest
import torch.distributed as dist

from hetero.ranks.process_groups import ProcessGroups, error_that_ends_this_rank
from tests.support.ranks.processes import RankPool
from tests.support.ranks.rank_training import told


class TestErrorThatEndsThisRank:
    @pytest.fixture(autouse=True)
    def an_error_printed_before(self, monkeypatch: pytest.MonkeyPatch) -> Exception:
        error = ValueError("printed before")
        monkeypatch.setattr(sys, "last_exc", error, raising=False)
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        return error

    def test_a_script_ends_by_the_error_that_nothing_caught(
        self, monkeypatch: pytest.MonkeyPatch, an_error_printed_before: Exception
    ) -> None:
        monkeypatch.delattr(sys, "ps1", raising=False)
        assert error_that_ends_this_rank() is an_error_printed_before

    def test_an_error_printed_in_a_notebook_earlier_is_not_the_reason(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        assert error_that_ends_this_rank() is None

    def test_the_error_that_is_being_handled_is_the_reason(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        error = RuntimeError("now")
        try:
            raise error
        except RuntimeError:
            assert error_that_ends_this_rank() is error


def name_after_the_default_group(rank: int, world: int) -> str:
    groups = ProcessGroups(60.0)
    groups.meet("the end of the default group")
    dist.destroy_process_group()
    groups.close()
    return groups.name


def test_ranks_keep_their_names_when_the_default_group_is_gone(ranks2: RankPool) -> None:
    assert ranks2.run(name_after_the_default_group) == ["rank 0", "rank 1"]


def meet_at_ends_of_long_names(rank: int, world: int) -> str:
    groups = ProcessGroups(60.0)
    found = told(lambda: groups.meet(f"load {'folder/' * 100}{rank}"))
    groups.close()
    return found


def test_calls_with_long_names_that_differ_at_their_ends_are_told(ranks2: RankPool) -> None:
    for rank, found in enumerate(ranks2.run(meet_at_ends_of_long_names)):
        assert found.startswith(f"HeteroError: rank {1 - rank} is at load folder/folder/")
