"""hetero/ranks/start/meeting: ranks that come at different times."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from hetero.ranks.start import meeting
from tests.support.ranks.processes import RankPool
from tests.support.waiting import until


def threads_of_meetings() -> list[str]:
    return [t.name for t in threading.enumerate() if "meeting" in t.name]


def meet_late(rank: int, world: int) -> list[str]:
    """One rank comes to receive when the others have received its byte, and gone on."""
    receive = meeting._Connected._receive

    def receive_late(self: Any, other: int) -> None:
        time.sleep(0.3)  # the others are through by then; if not, nothing is tested
        receive(self, other)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(meeting._Connected, "_receive", receive_late)
        for _ in range(2):
            with meeting.meet(range(world), 60.0):
                pass
    until(lambda: not threads_of_meetings())
    return threads_of_meetings()


def test_a_byte_arrives_after_its_sender_went_on(ranks2: RankPool) -> None:
    assert ranks2.run(meet_late) == [[], []]
