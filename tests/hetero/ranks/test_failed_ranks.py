"""hetero/ranks/waiting: what is known of failed ranks."""

from __future__ import annotations

import pytest

from hetero.ranks.waiting import FailedRanks
from offload.errors import PeerError


def test_the_first_cause_is_told() -> None:
    """What follows from it, of the same rank or of another one, comes later."""
    failures = FailedRanks()
    failures.check()
    failures.note(2, "rank 2 is out of memory")
    failures.note(2, "rank 2 is gone")
    failures.note(1, "rank 1 gave up")
    assert failures.first == (2, "rank 2 is out of memory")
    with pytest.raises(PeerError, match="rank 2 is out of memory"):
        failures.check()
