"""ProcessGroups.all_or_none(): one rank's failure is every rank's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetero.ranks.process_groups import ProcessGroups
from offload.errors import BudgetError, HeteroError, PeerError


class _InUseError(HeteroError):
    pass


def groups(others: list[bytes]) -> ProcessGroups:
    """This rank 0 among ranks that send `others`."""

    def all_gather_bytes(content: bytes, what: str) -> list[bytes]:
        return [content, *others]

    made = ProcessGroups(1.0)
    everyone: Any = SimpleNamespace(
        any=lambda flag, what: bool(flag) or any(others),
        all_gather_bytes=all_gather_bytes,
        name=lambda peer: f"rank {peer}",
        size=1 + len(others),
    )
    made.everyone, made.local_ranks = everyone, everyone.size
    return made


def sent(failure: BaseException) -> bytes:
    """What a rank that met `failure` sends."""
    said: list[bytes] = []

    def all_gather_bytes(content: bytes, what: str) -> list[bytes]:
        said.append(content)
        return [content]

    made = groups([])
    made.everyone.all_gather_bytes = all_gather_bytes  # type: ignore[method-assign, union-attr]
    with pytest.raises(type(failure)):
        made.all_or_none(failure, "move homes", (_InUseError,))
    return said[0]


NOTHING = b""


def test_of_several_machines_the_failed_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setattr(ProcessGroups, "is_on_several_machines", True)
    with pytest.raises(HeteroError, match="rank 1 on node7 could not move homes, so no rank did"):
        groups([sent(BudgetError("too small"))]).all_or_none(None, "move homes")


def test_nothing_is_raised_if_no_rank_failed() -> None:
    groups([NOTHING, NOTHING]).all_or_none(None, "move homes")
    ProcessGroups(1.0).all_or_none(None, "move homes")


def test_a_rank_raises_its_own_failure() -> None:
    own = BudgetError("too small")
    with pytest.raises(BudgetError, match="too small") as error:
        groups([sent(BudgetError("another"))]).all_or_none(own, "move homes")
    assert error.value is own
    with pytest.raises(BudgetError, match="too small"):
        ProcessGroups(1.0).all_or_none(own, "move homes")


def test_the_first_failed_rank_is_named() -> None:
    failed = [NOTHING, sent(BudgetError("too small")), sent(BudgetError("later"))]
    with pytest.raises(
        HeteroError, match="rank 2 could not move homes, so no rank did: BudgetError: too small"
    ) as error:
        groups(failed).all_or_none(None, "move homes")
    assert type(error.value) is HeteroError


def test_a_class_may_be_kept() -> None:
    with pytest.raises(_InUseError, match="rank 1 could not move homes"):
        groups([sent(_InUseError("viewed"))]).all_or_none(None, "move homes", (_InUseError,))


def test_causes_come_before_their_effects() -> None:
    cause = sent(BudgetError("too small"))
    with pytest.raises(HeteroError, match="rank 2 could not .*too small"):
        groups([sent(PeerError("gone")), cause]).all_or_none(PeerError("rank 2"), "move homes")
    with pytest.raises(PeerError, match="rank 2"):
        groups([sent(PeerError("gone"))]).all_or_none(PeerError("rank 2"), "move homes")
