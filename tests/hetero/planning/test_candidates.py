"""hetero/planning/candidates: ranks, devices, buffers and the smallest budgets."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetero.chunks.layout import Layout, ParamSpec, Shard, pack
from hetero.overlap import STREAMING_BUFFERS
from hetero.planning.candidates import SmallestBudgets, place, smallest_budgets
from hetero.planning.placement import (
    Budgets,
    GroupSpec,
    Placement,
    PlacementError,
    SlotBytes,
)
from offload.memory.tiers import Tier
from tests.support.training.planning import (
    AMPLE,
    BF16,
    SLOT,
    layout_of,
    make_spec,
    placed_plans,
)


def smallest_budgets_of(spec: GroupSpec) -> SmallestBudgets:
    def place_within(host: int, device: int | None) -> Placement:
        return place(spec.within(replace(spec.budgets, host=host, device=device)))

    return smallest_budgets(place_within, spec.budgets.device)


@given(placed_plans(policies=("cpu", "nvme", "auto", "cuda")))
def test_a_placement_fits_and_names_every_chunk_once(placed_plan):
    spec, plan = placed_plan
    separate = plan.profile.separate
    if spec.policy == "cuda":
        assume(separate)
    try:
        p = place(spec)
    except PlacementError:
        return
    budgets, slot, layout = spec.budgets, spec.slot, spec.layout
    assert p.host_bytes <= budgets.host
    assert p.disk_bytes <= budgets.disk
    homed = dict.fromkeys(Tier, 0)
    for chunk in layout.chunks:
        homes = {p.param[chunk.id], p.grad[chunk.id], p.optim_state[chunk.id]} - {None}
        # With one kind of state on DEVICE all are, or it could not be updated there.
        assert Tier.DEVICE not in homes or homes == {Tier.DEVICE}
        assert (p.optim_state[chunk.id] is None) is (not chunk.trainable)
        for tier, nbytes in (
            (p.param[chunk.id], slot.param),
            (p.grad[chunk.id], slot.grad),
            (p.optim_state[chunk.id], slot.optim_state),
        ):
            if tier is not None:
                homed[tier] += chunk.slots * nbytes
    assert p.disk_bytes == homed[Tier.DISK]
    if separate:
        assert p.device_bytes <= budgets.device
        pools = p.gathered_slots * slot.gathered + p.grad_offload_bytes
        assert p.device_bytes == homed[Tier.DEVICE] + pools
        elsewhere = layout.shard.ranks > 1 and layout.shard.params
        gathers = elsewhere or any(tier is not Tier.DEVICE for tier in p.param)
        assert (p.gathered_slots >= spec.min_gathered_slots) is gathers
        assert (p.shard_slots > 0) is (Tier.DISK in p.param)
    else:
        assert homed[Tier.DEVICE] == p.device_bytes == 0


def test_where_updates_overlap_buffers_keep_the_optimizer_states_that_forward_waits_for():
    """A large first chunk: homes of whole chunks would be given to the smaller ones."""
    layout = layout_of(12 * SLOT, *[SLOT] * 36)
    each = SlotBytes.of(layout, BF16)
    host = layout.slot_count * (each.param + each.grad) + 17 * each.optim_state
    for overlaps in (False, True):
        made = place(make_spec(layout, Budgets(host, AMPLE), overlaps_updates=overlaps))
        assert (made.buffers - STREAMING_BUFFERS >= 12) is overlaps
        assert (Tier.HOST in made.optim_state) is not overlaps
        # Without a budget that the user gave no buffers grow, so homes are all that keeps states.
        given = Budgets(host, AMPLE, keep_optim_states=False)
        made = place(make_spec(layout, given, overlaps_updates=overlaps))
        assert Tier.HOST in made.optim_state


@pytest.mark.parametrize("policy", ["cpu", "nvme", "auto"])
def test_a_device_that_is_too_small_is_refused_to_the_byte(policy):
    layout = layout_of(*[SLOT] * 6)
    ample = Budgets(AMPLE, AMPLE, device=AMPLE)
    device = smallest_budgets_of(make_spec(layout, ample, policy))["device"]
    assert device == SlotBytes.of(layout, BF16).gathered + SLOT * 2
    place(make_spec(layout, replace(ample, device=device), policy))
    with pytest.raises(PlacementError, match=rf"device_memory .* \({device} bytes\)"):
        place(make_spec(layout, replace(ample, device=device - 1), policy))


def test_what_other_replicas_send_has_room():
    """A rank's part of the longest chunk."""
    layouts = [layout_of(SLOT, 3 * SLOT, shard=Shard(0, 2, replicas=count)) for count in (1, 2)]
    alone, both = (place(make_spec(each, Budgets(AMPLE, AMPLE), "cpu")) for each in layouts)
    part = both.longest_trained * SlotBytes.of(layouts[1], BF16).bucket // 2
    assert both.host_bytes - alone.host_bytes == both.pool_bytes - alone.pool_bytes == part > 0


def test_what_waits_for_chunk_groups_to_come_has_room():
    def least(waiting: int) -> int | None:
        budgets = Budgets(0, 0, waiting=waiting)
        return smallest_budgets_of(make_spec(layout_of(SLOT, SLOT), budgets, "cpu"))["host"]

    assert least(2 * AMPLE) == least(AMPLE) + AMPLE


@given(placed_plans())
def test_the_smallest_budgets_are_true_to_the_byte(placed_plan):
    spec, _ = placed_plan
    assume(spec.budgets.disk in (0, AMPLE))
    ample = replace(spec.budgets, host=AMPLE)
    if ample.device is not None:
        ample = replace(ample, device=AMPLE)
    if spec.policy == "nvme" and not ample.disk:
        return
    host, device = smallest_budgets_of(spec.within(ample)).values()
    place(spec.within(replace(ample, host=host)))
    if host:
        with pytest.raises(PlacementError, match=rf"the smallest that works is .*\({host} bytes\)"):
            place(spec.within(replace(ample, host=host - 1)))
    if device:
        with pytest.raises(PlacementError):
            place(spec.within(replace(ample, device=device - 1)))
    if device is not None:
        place(spec.within(replace(ample, device=device)))


def building_peak(layout: Layout, made: Placement, slot: SlotBytes, rank: int, disk: bool) -> int:
    """What a rank of several has in RAM at most while it makes one chunk after the other."""
    ranks, peak = layout.shard.ranks, 0
    part = {s.param.index: ceil(4 * s.param.numel / ranks) for c in layout.chunks for s in c.slices}
    waiting = {} if disk else dict(part)
    homes = made.pool_bytes
    for chunk in layout.chunks:
        mine = layout.shard.range(layout.chunk_numel(chunk), rank)
        here = 0
        for s in chunk.slices:
            here += 4 * sum(mine.start <= element < mine.stop for element in range(s.offset, s.end))
            waiting[s.param.index] = part[s.param.index]
            peak = max(peak, homes + here + sum(waiting.values()))
            del waiting[s.param.index]
        homes += chunk.slots * slot.param * (made.param[chunk.id] is Tier.HOST)
        homes += chunk.slots * slot.optim_state * (made.optim_state[chunk.id] is Tier.HOST)
        peak = max(peak, homes + here + sum(waiting.values()))
    return peak


@given(
    numels=st.lists(st.integers(1, 2 * SLOT), min_size=1, max_size=8),
    frozen=st.sets(st.integers(0, 7)),
    shard=st.builds(Shard, st.just(0), st.integers(2, 4), params=st.booleans()),
    disk=st.sampled_from([0, AMPLE]),
)
def test_ranks_have_room_for_what_they_bring_to_chunks(numels, frozen, shard, disk):
    """At the smallest budget: as much as the rank needs that has most of the elements."""
    specs = [ParamSpec(i, f"p{i}", n, i not in frozen) for i, n in enumerate(numels)]
    layout = pack(specs, shard.slot_multiple, shard)
    spec = make_spec(layout, Budgets(0, disk), "nvme" if disk else "cpu")
    host = smallest_budgets_of(spec)["host"]
    made = place(spec.within(replace(spec.budgets, host=host)))
    peaks = [building_peak(layout, made, spec.slot, rank, disk > 0) for rank in range(shard.ranks)]
    bare = place(spec.within(replace(spec.budgets, host=host, under_construction=False)))
    assert host == made.host_bytes >= max(peaks)
    if made.host_bytes > bare.host_bytes:
        assert made.host_bytes == max(*peaks, 4 * max(numels))
