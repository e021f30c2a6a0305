"""hetero/planning/trace: what is expected of a step."""

import pytest

from hetero.chunks.layout import ParamSpec, pack
from hetero.planning.trace import Phase, Trace, Work, expected_trace
from tests.support.training.planning import SLOT, layout_of

F, B = Phase.FORWARD, Phase.BACKWARD


def chunks(trace: Trace, phase: Phase) -> list[int]:
    return [use.chunk for use in trace.uses if use.phase is phase]


def test_forward_goes_in_the_order_of_registration_and_backward_returns():
    # Chunks are numbered in another order than their parameters come in the model.
    specs = [ParamSpec(i, "m", SLOT, True, group=i) for i in (4, 1, 2)]
    layout = pack(specs, SLOT)
    order = [c.id for c in sorted(layout.chunks, key=lambda c: c.slices[0].param.index)]
    trace = expected_trace(layout, Work(tokens=10, micro_batches=2), 1e6)
    assert chunks(trace, F) == order * 2
    assert chunks(trace, B) == order[::-1] * 2
    assert [u.phase for u in trace.uses] == ([F] * 3 + [B] * 3) * 2
    assert trace.expected


def test_computing_is_six_operations_per_parameter_and_token():
    layout = layout_of(SLOT, SLOT // 2)
    trace = expected_trace(layout, Work(tokens=10, micro_batches=3), 1e6)
    forward_s = 2 * (SLOT + SLOT // 2) * 30 / 1e6
    assert (trace.forward_s, trace.backward_s) == pytest.approx((forward_s, 2 * forward_s))
    again = expected_trace(layout, Work(10, 3, checkpointing=True), 1e6)
    assert again.backward_s == pytest.approx(3 * forward_s)
