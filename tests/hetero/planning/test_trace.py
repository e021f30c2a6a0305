"""hetero/trace: what is expected of a step, and what a recorder makes of one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.chunks.layout import ParamSpec, pack
from hetero.planning.trace import (
    Moment,
    Phase,
    Trace,
    TraceRecorder,
    Use,
    Work,
    completed,
    expected_trace,
)
from offload.cache.use_order import UseOrder
from tests.support.training.planning import SLOT, layout_of

F, B = Phase.FORWARD, Phase.BACKWARD


def chunks(trace: Trace, phase: Phase) -> list[tuple[int, int]]:
    return [(use.group_index, use.chunk) for use in trace.uses if use.phase is phase]


def test_forward_goes_in_the_order_of_registration_and_backward_returns():
    # Two chunk groups, whose parameters take turns in the model.
    main = pack([ParamSpec(i, "m", SLOT, True, group=i) for i in (0, 2, 5)], SLOT)
    other = pack([ParamSpec(i, "o", SLOT, True, group=i) for i in (1, 4)], SLOT, group_index=1)
    trace = expected_trace([main, other], Work(tokens=10, micro_batches=2), 1e6)
    forward = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert chunks(trace, F) == forward * 2
    assert chunks(trace, B) == forward[::-1] * 2
    assert [u.phase for u in trace.uses] == ([F] * 5 + [B] * 5) * 2
    of_other = trace.of_chunk_group(1, 0.25)
    assert [u.chunk for u in of_other.uses] == [0, 1, 1, 0] * 2
    assert of_other.forward_s == trace.forward_s / 4
    assert trace.expected


def test_computing_is_six_operations_per_parameter_and_token():
    layout = layout_of(SLOT, SLOT // 2)
    trace = expected_trace([layout], Work(tokens=10, micro_batches=3), 1e6)
    forward_s = 2 * (SLOT + SLOT // 2) * 30 / 1e6
    assert (trace.forward_s, trace.backward_s) == pytest.approx((forward_s, 2 * forward_s))
    again = expected_trace([layout], Work(10, 3, checkpointing=True), 1e6)
    assert again.backward_s == pytest.approx(3 * forward_s)


class Machine:
    """A clock and counters that a test moves by hand."""

    def __init__(self, chunk_groups: int = 1):
        self.now_s = self.waited_s = 0.0
        self.bytes = (0, 0)
        self.orders = [UseOrder() for _ in range(chunk_groups)]
        self.recorder = TraceRecorder(
            self.orders, lambda: self.bytes, lambda: self.waited_s, lambda: self.now_s
        )

    def phase(self, phase: Phase, *uses: int, seconds: float = 1.0, waits: float = 0.0) -> None:
        self.recorder.begin(phase)
        for chunk in uses:
            self.orders[0].note(chunk)
        self.now_s += seconds
        self.waited_s += waits
        self.recorder.begin(None)


def test_a_recorder_tells_phases_micro_batches_and_seconds_of_computing():
    machine = Machine()
    for _ in range(2):
        machine.phase(F, 0, 1, 2, seconds=3, waits=1)
        machine.now_s += 100  # whatever goes on between
        machine.phase(B, 2, 1, 0, seconds=5, waits=2)
    trace = machine.recorder.end_step()
    assert trace is not None
    # 2 is used last in forward and first in backward: for the order that is one use.
    assert chunks(trace, F) == [(0, 0), (0, 1), (0, 2), (0, 1), (0, 2)]
    assert chunks(trace, B) == [(0, 1), (0, 0)] * 2
    assert trace.micro_batches == 2
    assert (trace.forward_s, trace.backward_s) == (2 * 2, 2 * 3)
    assert not trace.expected
    assert machine.recorder.end_step() is None


def test_a_recorder_keeps_banks_apart_and_samples_memory():
    machine = Machine(chunk_groups=2)
    machine.recorder.begin(F)
    machine.orders[0].note(7)
    machine.orders[1].note(3)
    machine.bytes = (500, 40)
    machine.recorder.begin(B)
    machine.bytes = (300, 90)
    trace = machine.recorder.end_step()
    assert set(trace.uses) == {Use(0, 7, F), Use(1, 3, F)}
    assert trace.memory == (Moment(0, 0, 0), Moment(2, 500, 40), Moment(2, 300, 90))
    assert trace.peak() == Moment(0, 500, 90)


@given(st.sets(st.integers(0, 5)), st.integers(1, 3))
def test_a_recording_with_gaps_is_completed_to_what_is_expected(gathered, micro_batches):
    layout = layout_of(*[SLOT] * 6)
    whole = expected_trace([layout], Work(1, micro_batches), 1.0)
    seen = tuple(use for use in whole.uses if use.chunk in gathered)
    recorded = Trace(seen, micro_batches, 1.0, 2.0)
    assert completed(recorded, [layout]).uses == whole.uses


@given(st.lists(st.integers(0, 5), max_size=12))
def test_completing_keeps_what_was_seen_in_its_order(uses):
    layout = layout_of(*[SLOT] * 6)
    half = len(uses) // 2
    seen = tuple(Use(0, c, F if i < half else B) for i, c in enumerate(uses))
    made = completed(Trace(seen, 1, 1.0, 1.0), [layout])
    assert {use.chunk for use in made.uses} == set(range(6))
    rest = iter(made.uses)
    assert all(use in rest for use in seen)
