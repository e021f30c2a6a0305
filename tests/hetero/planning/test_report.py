"""hetero/planning/report: the figures in the table are those of the placement and its step."""

from dataclasses import replace

import pytest

from hetero.planning.candidates import place
from hetero.planning.placement import Budgets
from hetero.planning.report import as_dict, explain
from hetero.planning.step_cost import Plan
from offload.memory.sizes import format_bytes
from tests.support.training.planning import (
    AMPLE,
    SLOT,
    layout_of,
    make_plan,
    make_spec,
    separate_profile,
    total_bytes,
)

LAYOUT = layout_of(*[16 * SLOT] * 12)
TOTAL = total_bytes(LAYOUT)


def planned(**budgets) -> Plan:
    given = Budgets(**{"host": TOTAL // 2, "disk": AMPLE, "device": None, **budgets})
    profile = None if given.device is None else separate_profile()
    spec = make_spec(LAYOUT, given)
    return make_plan(LAYOUT, profile, tokens=1e-4, spec=spec)


def test_bytes_and_seconds_are_the_plan_s():
    made = planned()
    facts = as_dict([made])
    assert sum(facts["bytes"]["disk"].values()) == made.group.placement.disk_bytes
    assert sum(facts["bytes"]["host"].values()) <= made.group.placement.host_bytes
    assert facts["step_s"] == made.cost.seconds
    written = facts["nvme_bytes_written_per_1000_steps"]
    assert written == 1000 * made.cost.traffic["nvme_written"] > 0
    assert facts["bound"] == "NVMe"
    text = explain([made])
    for part in (
        format_bytes(made.group.placement.disk_bytes),
        "bound by: NVMe",
        f"written per 1000 steps: {format_bytes(written)}",
        "Computing is estimated",
        "one more GiB",
        "HOST",
        "DISK",
    ):
        assert part in text
    assert "DEVICE" not in text


def test_with_a_device_its_bytes_add_up():
    made = planned(device=TOTAL // 3)
    facts = as_dict([made])
    assert sum(facts["bytes"]["device"].values()) == made.group.placement.device_bytes > 0
    assert "DEVICE" in explain([made])


def test_one_more_gib_buys_what_its_placement_says():
    made = planned()
    spec = made.group.spec
    more = replace(spec.budgets, host=spec.budgets.host + (1 << 30))
    ample = made.cost_of(place(spec.within(more)))
    gains = as_dict([made])["one_more_gib_saves_s"]
    assert gains["RAM"] == pytest.approx(made.cost.seconds - ample.seconds)
    assert gains["RAM"] > 0
    assert gains["NVMe"] == 0


def test_several_chunk_groups_are_added():
    made = planned()
    both = as_dict([made, made])
    assert both["step_s"] == 2 * made.cost.seconds
    assert (
        both["bytes"]["disk"]["OPTIM_STATE"] == 2 * as_dict([made])["bytes"]["disk"]["OPTIM_STATE"]
    )
    assert "step" in explain([made, made])


def test_the_smallest_budgets_are_quoted():
    made = planned()
    host = as_dict([made])["smallest_budgets"]["host"]
    assert f"({host} bytes) of RAM" in explain([made])
    assert "(77 bytes) of RAM" in explain([made], {"host": 77, "device": None})


def test_a_file_without_room_for_more_is_explained():
    """With less RAM it would have to hold more, so no smaller budget of RAM works beside it."""
    made = planned(disk=planned().group.placement.disk_bytes)
    assert "Smallest budgets that work" in explain([made])
