"""hetero/ranks/process_groups: which ranks share a model's state, and why one of them ends."""

import sys

import pytest

from hetero.ranks.process_groups import error_that_ends_this_rank


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
