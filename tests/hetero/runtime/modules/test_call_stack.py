"""hetero/runtime/modules/call_stack.py: which calls are taken for interrupted ones."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from hetero.runtime.modules.call_stack import EnteredCalls, FramePlace


@pytest.mark.parametrize("field", ["address", "code", "depth"])
def test_a_call_whose_place_has_another_frame_was_interrupted(field: str) -> None:
    """An address alone says little: most frames have that of one that has ended."""
    others = {"address": 1, "code": 1, "depth": 0}
    calls, module, frame = EnteredCalls(), nn.Linear(1, 1), sys._getframe()
    call = calls.enter(module, frame)
    ended: list[str] = []
    call.present.callback(ended.append, field)
    calls.unwind()
    assert not ended
    place = FramePlace.of(frame)._asdict()
    call.frame = FramePlace(**place | {field: others[field]})
    calls.unwind()
    assert ended == [field]
    assert not calls.own
    del frame, call
