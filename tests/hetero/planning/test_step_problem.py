"""hetero/planning/step_problem: what is expected of a step."""

import pytest

from hetero.chunks.layout import ParamSpec, pack
from hetero.planning.step_problem import Work, expected_trace, use_order
from tests.support.training.planning import SLOT, layout_of


def test_forward_goes_in_the_order_of_registration():
    # Chunks are numbered in another order than their parameters come in the model.
    specs = [ParamSpec(i, "m", SLOT, True, group=i) for i in (4, 1, 2)]
    layout = pack(specs, SLOT)
    first = {chunk.id: chunk.slices[0].param.index for chunk in layout.chunks}
    assert [first[chunk] for chunk in use_order(layout)] == [1, 2, 4]
    assert expected_trace(layout, Work(tokens=10, micro_batches=2), 1e6).expected


def test_computing_is_six_operations_per_parameter_and_token():
    layout = layout_of(SLOT, SLOT // 2)
    trace = expected_trace(layout, Work(tokens=10, micro_batches=3), 1e6)
    forward_s = 2 * (SLOT + SLOT // 2) * 30 / 1e6
    assert (trace.forward_s, trace.backward_s) == pytest.approx((forward_s, 2 * forward_s))
    again = expected_trace(layout, Work(10, 3, checkpointing=True), 1e6)
    assert again.backward_s == pytest.approx(3 * forward_s)
