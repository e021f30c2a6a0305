"""hetero/ranks/meeting: ranks that come at different times."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from hetero.ranks import meeting
from tests.support.ranks.processes import RankPool


def meet_late(rank: int, world: int) -> list[str]:
    """One rank comes to receive when the others have received its byte, and gone on."""
    receive = meeting._Arrivals._receive

    def receive_late(self: Any, other: int) -> None:
        time.sleep(0.3)  # the others are through by then; if not, nothing is tested
        receive(self, other)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(meeting._Arrivals, "_receive", receive_late)
        for _ in range(2):
            meeting.meet(range(world), 60.0)
    return [t.name for t in threading.enumerate() if "meeting" in t.name]


def test_a_byte_arrives_after_its_sender_went_on(ranks2: RankPool) -> None:
    assert ranks2.run(meet_late) == [[], []]
