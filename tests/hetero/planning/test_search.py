"""hetero/plan: what is planned fits, is no slower than what was, and nearly as fast as can be."""

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetero.chunks.layout import Shard
from hetero.overlap import STREAMING, OverlapUpdates
from hetero.planning.placement import (
    HEADROOMS,
    Budgets,
    Maker,
    Placement,
    PlacementError,
    SlotBytes,
    Split,
    place,
)
from hetero.planning.search import plan, smallest_budgets
from hetero.planning.step_cost import CostModel, Problem
from offload.memory.tiers import Tier
from tests.support.training.planning import (
    AMPLE,
    BF16,
    SLOT,
    layout_of,
    make_problem,
    make_profile,
    problems,
    separate_profile,
    total_bytes,
)


def placed(problem: Problem) -> Placement:
    return place(
        problem.layout,
        problem.dtypes,
        problem.policy,
        problem.budgets,
        problem.min_gathered_slots,
        problem.held,
    )


def made_or_refused(make):
    """What `make` gives, or why not."""
    try:
        return make(), ""
    except PlacementError as refusal:
        return None, str(refusal)


@settings(max_examples=300, deadline=None)
@given(problems(policies=("cpu", "nvme", "auto", "cuda")))
def test_a_plan_exists_where_a_placement_does_and_is_no_slower(problem):
    if problem.policy == "cuda":
        assume(problem.profile.separate)
    first, refusal = made_or_refused(lambda: placed(problem))
    made, same = made_or_refused(lambda: plan(problem))
    if first is None:
        if made is None:
            assert same == refusal
        else:  # it looks at more, where the disk is short and there is a device
            assert problem.profile.separate
            assert made.placement.host_bytes <= problem.budgets.host
            assert made.placement.disk_bytes <= problem.budgets.disk
        return
    assert made.cost.seconds <= CostModel(problem).cost(first).seconds * (1 + 1e-6) + 1e-9
    assert made.cost == CostModel(problem).cost(made.placement)


@settings(max_examples=300, deadline=None)
@given(problems(policies=("cpu", "nvme", "auto", "cuda")))
def test_a_plan_fits_and_names_every_chunk_once(problem):
    if problem.policy == "cuda":
        assume(problem.profile.separate)
    try:
        made = plan(problem)
    except PlacementError:
        return
    p, budgets, slot = made.placement, problem.budgets, SlotBytes.of(problem.layout, BF16)
    assert p.host_bytes <= budgets.host
    assert p.disk_bytes <= budgets.disk
    homed = dict.fromkeys(Tier, 0)
    for chunk in problem.layout.chunks:
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
    if problem.profile.separate:
        assert p.device_bytes <= budgets.device
        pools = p.gathered_slots * slot.gathered + p.grad_offload_bytes
        assert p.device_bytes == homed[Tier.DEVICE] + pools
        shard = problem.layout.shard
        elsewhere = shard.ranks > 1 and shard.params
        gathers = elsewhere or any(tier is not Tier.DEVICE for tier in p.param)
        assert (p.gathered_slots >= problem.min_gathered_slots) is gathers
        assert (p.shard_slots > 0) is (Tier.DISK in p.param)
    else:
        assert homed[Tier.DEVICE] == p.device_bytes == 0
    trained = {c.id for c in problem.layout.chunks if c.trainable}
    assert sorted(made.host_updates + made.device_updates) == sorted(trained)
    assert {c for c in trained if p.optim_state[c] is Tier.DEVICE} == set(made.device_updates)


def every_placement(problem: Problem) -> list[Placement]:
    """All homes in RAM and on DISK of chunks of one slot, whatever their order, that fit."""
    layout = problem.layout
    n = len(layout.chunks)
    assert {c.slots for c in layout.chunks} == {1}
    maker = Maker(layout, BF16, problem.policy, problem.budgets, problem.min_gathered_slots)
    found = []
    both = (Tier.HOST, Tier.DISK)
    for homes in itertools.product(itertools.product(both, repeat=n), repeat=3):
        counts = [each.count(Tier.HOST) for each in homes]
        for headroom in maker.headrooms if Tier.DISK not in sum(homes, ()) else HEADROOMS:
            candidate = maker.with_more_buffers(maker.candidate(Split(0, *counts), headroom))
            made = maker.checked(maker.placement(candidate))
            if made is not None:
                param, grad, optim_state = homes
                found.append(replace(made, param=param, grad=grad, optim_state=optim_state))
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(SLOT // 2, SLOT), min_size=1, max_size=3),
    st.floats(0.1, 1.1),
    st.tuples(*[st.floats(0.1, 100)] * 3),
    st.floats(1e-3, 10),
    st.sampled_from([1, 3]),
)
def test_no_other_homes_are_faster_by_more_than_a_chunk(numels, share, rates, tokens, batches):
    layout = layout_of(*numels)
    reading, writing, updating = rates
    profile = make_profile(
        nvme_read_bytes_per_s=reading,
        nvme_write_bytes_per_s=writing,
        nvme_mixed_bytes_per_s=(reading + writing) / 2,
        update_bytes_per_s={"bf16": updating},
    )
    budgets = Budgets(int(total_bytes(layout) * share), AMPLE, under_construction=False)
    problem = make_problem(layout, budgets, profile, tokens=tokens, micro_batches=batches)
    others = every_placement(problem)
    if not others:
        with pytest.raises(PlacementError):
            plan(problem)
        return
    model = CostModel(problem)
    best = min(model.cost(other).seconds for other in others)
    # Which chunks are first in RAM is the same for all kinds of state and goes by size: what that
    # may cost is that one chunk's way from and to the disk overlaps nothing.
    slot = SlotBytes.of(layout, BF16)
    chunk = (slot.param + slot.grad + slot.optim_state) * (1 / reading + 1 / writing)
    made = plan(problem)
    assert best <= made.cost.seconds * (1 + 1e-9)
    assert made.cost.seconds <= best + chunk


@settings(max_examples=300, deadline=None)
@given(problems())
def test_no_resource_is_busy_longer_than_the_step(problem):
    try:
        made = plan(problem)
    except PlacementError:
        return
    assert made.cost.seconds >= made.cost.lower_bound_s * (1 - 1e-9)
    model = CostModel(problem)
    if problem.trace.micro_batches <= 3:
        assert model.lower_bound_s(made.placement) <= made.cost.seconds * (1 + 1e-9)


def test_what_backward_leaves_to_the_next_forward_keeps_the_network_busy():
    """Late updates beside forward do not get what gradients before still take of the network."""
    layout = layout_of(1, 1, 1, 1, shard=Shard(0, 2, grads=True, params=False))
    profile = separate_profile(
        update_bytes_per_s={"bf16": 5.0},
        h2d_bytes_per_s=3.0,
        d2h_bytes_per_s=2.0,
        device_update_bytes_per_s={"bf16": 45.0},
    )
    problem = make_problem(
        layout,
        Budgets(393_216, 0, device=262_144, keep_optim_states=False, under_construction=False),
        profile,
        policy="cpu",
        micro_batches=3,
        prefetch=False,
        overlap=OverlapUpdates.FORWARD,
        network_bytes_per_s=1.0,
    )
    trace = replace(problem.trace, forward_s=24.0, backward_s=48.0)
    cost = plan(replace(problem, trace=trace)).cost
    assert cost.bound == "network"
    assert cost.seconds >= cost.lower_bound_s


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(0, 1))
def test_more_memory_is_never_predicted_to_be_much_slower(problem, share):
    try:
        less = plan(problem)
    except PlacementError:
        return
    more = int(total_bytes(problem.layout) * share)
    budgets = replace(problem.budgets, host=problem.budgets.host + more)
    now = plan(replace(problem, budgets=budgets))
    # With more RAM the counts that fit are others; none of the old ones is lost but by buffers.
    assert now.cost.seconds <= less.cost.seconds * 1.25 + 1e-9


LARGE = layout_of(*[SLOT] * 200)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("share", [0.12, 0.3, 0.6])
@pytest.mark.parametrize("tokens", [1e-3, 3.0, 100.0])
def test_of_many_chunks_each_phase_is_as_long_as_its_busiest_resource(separate, share, tokens):
    host = int(total_bytes(LARGE) * share)
    budgets = Budgets(host, AMPLE, device=host // 3 if separate else None)
    profile = separate_profile() if separate else make_profile()
    made = plan(make_problem(LARGE, budgets, profile, tokens=tokens))
    for phase in made.cost.phases:
        assert phase.seconds <= max(phase.busy_s.values()) * 1.06, phase


def test_compute_that_hides_the_disk_lets_parameters_go_there_first():
    layout = layout_of(*[SLOT] * 8)
    slot = SlotBytes.of(layout, BF16)
    pools = 3 * slot.gathered + 4 * (slot.optim_state + slot.param)
    # Room for what is moved and for a few optimizer states; computing takes nearly for ever.
    host = 8 * slot.grad + pools + 4 * slot.optim_state
    problem = make_problem(layout, Budgets(host, AMPLE, under_construction=False), tokens=100.0)
    made = plan(problem)
    forward, backward = made.cost.phases[:2]
    assert forward.seconds == pytest.approx(forward.busy_s["compute"], rel=0.01)
    assert backward.seconds == pytest.approx(backward.busy_s["compute"], rel=0.01)


def test_where_forward_waits_for_a_large_chunk_buffers_keep_its_records():
    layout = layout_of(12 * SLOT, *[SLOT] * 36)
    each = SlotBytes.of(layout, BF16)
    host = layout.slot_count * (each.param + each.grad) + 17 * each.optim_state
    for overlap in (OverlapUpdates.NONE, OverlapUpdates.BOTH):
        problem = make_problem(
            layout,
            Budgets(host, AMPLE),
            overlap=overlap,
        )
        # Computing hides the disk, but not from the first chunk.
        trace = replace(problem.trace, forward_s=3e6, backward_s=6e6)
        made = plan(replace(problem, trace=trace)).placement
        kept = made.buffers - STREAMING
        assert (kept >= 12) is overlap.repeats
        assert (Tier.HOST in made.optim_state) is not overlap.repeats


def test_everything_on_the_device_is_fastest_where_it_fits():
    layout = layout_of(*[SLOT] * 6)
    budgets = Budgets(AMPLE, AMPLE, device=AMPLE, under_construction=False)
    made = plan(make_problem(layout, budgets, separate_profile()))
    assert set(made.placement.optim_state) == {Tier.DEVICE}
    assert made.placement.gathered_slots == made.placement.grad_offload_bytes == 0
    assert made.cost.traffic.h2d == made.cost.traffic.d2h == 0
    assert made.host_updates == ()


@pytest.mark.parametrize("policy", ["cpu", "nvme", "auto"])
def test_a_device_that_is_too_small_is_refused_to_the_byte(policy):
    layout = layout_of(*[SLOT] * 6)
    profile = separate_profile()
    ample = Budgets(AMPLE, AMPLE, device=AMPLE)
    _, device = smallest_budgets(make_problem(layout, ample, profile, policy))
    assert device == SlotBytes.of(layout, BF16).gathered + SLOT * 2
    plan(make_problem(layout, replace(ample, device=device), profile, policy))
    with pytest.raises(PlacementError, match=rf"device_memory .* \({device} bytes\)"):
        plan(make_problem(layout, replace(ample, device=device - 1), profile, policy))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_smallest_budgets_are_true_to_the_byte(problem):
    assume(problem.budgets.disk in (0, AMPLE))
    ample = replace(problem.budgets, host=AMPLE)
    if ample.device is not None:
        ample = replace(ample, device=AMPLE)
    problem = replace(problem, budgets=ample)
    if problem.policy == "nvme" and not ample.disk:
        return
    host, device = smallest_budgets(problem)
    plan(replace(problem, budgets=replace(ample, host=host)))
    if host:
        with pytest.raises(PlacementError):
            plan(replace(problem, budgets=replace(ample, host=host - 1)))
    if device:
        with pytest.raises(PlacementError):
            plan(replace(problem, budgets=replace(ample, device=device - 1)))
    if device is not None:
        plan(replace(problem, budgets=replace(ample, device=device)))


def test_a_thousand_chunks_are_planned_in_reasonable_time():
    layout = layout_of(*[SLOT] * 1000)
    total = total_bytes(layout)
    for profile, device in ((make_profile(), None), (separate_profile(), total // 5)):
        for share in (0.1, 0.5, 2):
            budgets = Budgets(int(total * share), AMPLE, device=device)
            begin = time.perf_counter()
            made = plan(make_problem(layout, budgets, profile, micro_batches=16))
            seconds = time.perf_counter() - begin
            print(f"1000 chunks, {share} in RAM: {seconds:.2f} s, {made.looked_at} looked at")
