"""hetero/planning/step_cost: seconds and bytes of small steps that can be worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given

from hetero.chunks.layout import ParamSpec, Shard, pack
from hetero.overlap import OverlapUpdates
from hetero.planning.belady import ahead_slots
from hetero.planning.candidates import place
from hetero.planning.network import AGREEMENTS, Network
from hetero.planning.placement import Budgets, GroupSpec, Placement, PlacementError, SlotBytes
from hetero.planning.step_cost import (
    ALL_GATHERS,
    COMPUTE,
    CPU_UPDATE,
    D2H,
    H2D,
    MEANS,
    NETWORK,
    NODE_LINKS,
    NVME,
    TRAFFIC,
    Computing,
    Plan,
    Work,
    expected_computing,
)
from offload.memory.tiers import Tier
from tests.support.training.planning import (
    AMPLE,
    BF16,
    SLOT,
    layout_of,
    make_plan,
    make_profile,
    make_spec,
    placed_plans,
    separate_profile,
    total_bytes,
)

CHUNKS = 4
LAYOUT = layout_of(*[SLOT] * CHUNKS)
BYTES = SlotBytes.of(LAYOUT, BF16)
PARAM = BYTES.param
HOST, DISK, DEVICE = Tier.HOST, Tier.DISK, Tier.DEVICE


def made(param=HOST, grad=HOST, optim_state=HOST, slots=0, buffers=0, **more) -> Placement:
    """A placement with all chunks alike, or as tuples say."""
    homes = [
        tuple(each) if isinstance(each, tuple) else (each,) * CHUNKS
        for each in (param, grad, optim_state)
    ]
    return placement(*homes, slots, buffers, **more)


def placement(param, grad, optim_state, slots=0, buffers=0, **more) -> Placement:
    return Placement(
        param=param,
        grad=grad,
        optim_state=optim_state,
        gathered_slots=slots,
        buffers=buffers,
        **more,
    )


def plan(profile=None, compute_s=(8.0, 16.0), **more) -> Plan:
    """Forward and backward of `compute_s` seconds, divided evenly over the chunks."""
    return replace(make_plan(LAYOUT, profile, **more), computing=Computing(*compute_s))


def disk(chunk_s: float):
    """A profile with a disk that reads the PARAM of a chunk in `chunk_s`."""
    rate = PARAM / chunk_s
    return make_profile(
        nvme_read_bytes_per_s=rate, nvme_write_bytes_per_s=rate, nvme_mixed_bytes_per_s=rate
    )


def seconds(made_: Placement, plan_: Plan) -> list[float]:
    return [phase.seconds for phase in plan_.cost_of(made_).phases]


UPDATE_S = CHUNKS * SLOT * BF16.update_bytes / 10


def test_in_ram_a_step_is_compute_and_update():
    cost = plan().cost_of(made())
    assert [p.name for p in cost.phases] == ["forward", "backward", "update"]
    assert [p.seconds for p in cost.phases] == pytest.approx([8, 16, UPDATE_S])
    assert cost.busy_s == pytest.approx({COMPUTE: 24, CPU_UPDATE: UPDATE_S})
    assert cost.traffic["nvme_read"] == cost.traffic["nvme_written"] == 0


def test_with_one_slot_nothing_overlaps():
    """Each chunk is read when the one before it is done: but for the last of forward, which
    backward begins with."""
    forward, backward, _ = seconds(made(param=DISK, slots=1), plan(disk(1.0)))
    assert forward == pytest.approx(8 + 4 * 1)
    assert backward == pytest.approx(16 + 3 * 1)


def test_with_two_slots_reads_hide_behind_compute():
    forward, backward, _ = seconds(made(param=DISK, slots=2), plan(disk(1.0)))
    assert forward == pytest.approx(8 + 1)  # the first read is waited for
    # Two are there still; the third's room is free when the first of them is done.
    assert backward == pytest.approx(16)


def test_a_slow_disk_bounds_the_phase():
    forward, backward, _ = seconds(made(param=DISK, slots=2), plan(disk(10.0)))
    assert forward == pytest.approx(4 * 10 + 2)
    assert backward == pytest.approx(2 * 10 + 4)  # two chunks are there still


def test_without_prefetch_every_read_is_waited_for():
    slow = plan(disk(1.0), prefetch=False)
    assert seconds(made(param=DISK, slots=2), slow)[:2] == pytest.approx([8 + 4, 16 + 2])


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
def test_buffers_save_traffic_of_records_in_a_straight_line(buffers):
    cost = plan(disk(1.0)).cost_of(made(optim_state=DISK, buffers=buffers))
    streamed = (CHUNKS - buffers) * BYTES.optim_state
    assert cost.traffic["nvme_read"] == cost.traffic["nvme_written"] == streamed
    nvme_s = 2 * streamed / PARAM
    assert cost.phases[2].busy_s[NVME] == pytest.approx(nvme_s)
    if buffers == 1:
        assert cost.phases[2].seconds == pytest.approx(UPDATE_S + nvme_s)
    else:
        assert max(UPDATE_S, nvme_s) <= cost.phases[2].seconds <= UPDATE_S + nvme_s


def test_parameters_on_disk_are_written_once_a_step_whatever_the_buffers():
    cost = plan(disk(1.0)).cost_of(made(param=DISK, slots=4, buffers=4))
    assert cost.traffic["nvme_written"] == CHUNKS * PARAM
    assert cost.traffic["nvme_read"] == CHUNKS * PARAM  # once in forward; all four stay


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_gradients_on_disk_are_read_again_by_each_further_micro_batch(micro_batches):
    on_disk = made(grad=DISK, buffers=4)
    cost = plan(disk(1.0), micro_batches=micro_batches).cost_of(on_disk)
    assert cost.traffic["nvme_written"] == micro_batches * CHUNKS * BYTES.grad
    assert cost.traffic["nvme_read"] == micro_batches * CHUNKS * BYTES.grad  # the update's one, too


@pytest.mark.parametrize("micro_batches", [5, 7])
def test_alike_micro_batches_are_multiplied(micro_batches):
    """Each takes what the fourth one adds to three, which are walked through one by one."""

    def cost_of(count):
        slow = plan(disk(3.0), (8.0 * count, 16.0 * count), micro_batches=count)
        return slow.cost_of(made(param=DISK, slots=2))

    cost, three, four = map(cost_of, (micro_batches, 3, 4))
    for found, expected, one_more in (
        (cost.seconds, three.seconds, four.seconds - three.seconds),
        *((cost.traffic[k], three.traffic[k], four.traffic[k] - three.traffic[k]) for k in TRAFFIC),
    ):
        assert found == pytest.approx(expected + (micro_batches - 3) * one_more)


def test_a_separate_device_fetches_over_the_link_and_sends_gradients_back():
    profile = separate_profile(
        h2d_bytes_per_s=PARAM / 1.0, d2h_bytes_per_s=SLOT * 2 / 3.0, device_bytes=AMPLE
    )
    cost = plan(profile).cost_of(made(slots=2))
    assert cost.traffic["h2d"] == (4 + 2) * PARAM
    assert cost.traffic["d2h"] == CHUNKS * SLOT * 2
    forward, backward = cost.phases[:2]
    assert forward.seconds == pytest.approx(8 + 1)
    assert backward.seconds == pytest.approx(16 + 3)  # the last gradient leaves when all is done
    assert (forward.busy_s[H2D], backward.busy_s[H2D], backward.busy_s[D2H]) == (4, 2, 12)


def test_what_is_on_the_device_moves_nothing_and_is_updated_there():
    profile = separate_profile()
    half = (DEVICE, DEVICE, HOST, HOST)
    cost = plan(profile).cost_of(made(half, half, half, slots=2))
    assert cost.traffic["h2d"] == 2 * PARAM
    assert cost.traffic["d2h"] == 2 * SLOT * 2
    update = cost.phases[2]
    assert update.busy_s[CPU_UPDATE] == pytest.approx(UPDATE_S / 2)
    assert update.seconds == pytest.approx(UPDATE_S / 2)  # the device is quicker


def test_from_disk_to_device_a_chunk_takes_both_ways():
    profile = replace(
        disk(2.0),
        h2d_bytes_per_s=PARAM / 1.0,
        d2h_bytes_per_s=1e9,
        device_bytes=AMPLE,
        device_update_bytes_per_s={"bf16": 1.0},
    )
    placed = made(param=DISK, slots=1, shard_slots=2)
    forward, _, _ = seconds(placed, plan(profile))
    assert forward == pytest.approx(4 * (2 + 1) + 8)
    # With room for one more the link and the disk work while others compute.
    forward, _, _ = seconds(replace(placed, gathered_slots=2), plan(profile))
    assert forward == pytest.approx(2 + 1 + 8)


def test_updates_overlap_backward():
    """With the disk; not with computing, if that is done by the same CPU."""
    on_disk = made(optim_state=DISK, buffers=3)
    update_s, nvme_s = UPDATE_S, 2 * CHUNKS * BYTES.optim_state / (PARAM * 10)
    normal, early = plan(disk(0.1)), plan(disk(0.1), overlap=OverlapUpdates.BACKWARD)
    cost = early.cost_of(on_disk)
    assert 8 + 16 + update_s <= cost.seconds < 8 + 16 + update_s + nvme_s
    in_ram = plan(overlap=OverlapUpdates.BACKWARD).cost_of(made())
    assert in_ram.seconds == pytest.approx(plan().cost_of(made()).seconds)
    # Buffers that pass tiles on keep nothing.
    assert cost.traffic["nvme_read"] == min(CHUNKS, 2 * (CHUNKS - 3)) * BYTES.optim_state
    assert normal.cost_of(on_disk).traffic["nvme_read"] == (CHUNKS - 3) * BYTES.optim_state


def test_updates_overlap_forward():
    """Alone the next forward; with updates in backward, too, the whole step."""
    on_disk = made(optim_state=DISK, buffers=3)
    profile = disk(6.0)
    nvme_s = plan(profile).cost_of(on_disk).busy_s[NVME]
    assert nvme_s > 24, "the disk decides"
    late = plan(profile, overlap=OverlapUpdates.FORWARD).cost_of(on_disk)
    assert [p.name for p in late.phases] == ["forward and update", "backward"]
    both = plan(profile, overlap=OverlapUpdates.BOTH).cost_of(on_disk)
    assert [p.name for p in both.phases] == ["forward, backward and update"]
    assert late.seconds == pytest.approx(late.phases[0].seconds + 16)
    assert both.seconds == pytest.approx(late.phases[0].seconds)


def test_few_buffers_hide_less_of_the_update_beside_computing():
    on_disk = [made(optim_state=DISK, buffers=count) for count in (1, 2, 3)]
    for overlap, share in ((OverlapUpdates.NONE, 1), (OverlapUpdates.FORWARD, 2)):
        model = plan(disk(0.1), overlap=overlap)
        updates = [model._update(each) for each in on_disk]
        assert updates[0].seconds > updates[1].seconds > updates[2].seconds
        assert updates[0].seconds == pytest.approx(share * UPDATE_S + updates[0].busy_s[NVME])


def test_ranks_send_what_the_others_need():
    shard = Shard(0, 2)
    layout = layout_of(*[2 * SLOT] * CHUNKS, shard=shard)
    whole = SlotBytes.of(layout, BF16)
    sharded = make_plan(layout, network=Network(nodes=2, node_bytes_per_s=whole.gathered / 2))
    placed = place(GroupSpec(layout, BF16, "cpu", Budgets(AMPLE, 0), 1))
    cost = sharded.cost_of(placed)
    ahead = ahead_slots({chunk.id: chunk.slots for chunk in layout.chunks}, placed.gathered_slots)
    gathers = 2 * CHUNKS - min(CHUNKS, placed.gathered_slots - ahead)
    half = whole.gathered // 2
    assert cost.traffic["sent"] == gathers * half + CHUNKS * whole.bucket // 2
    assert cost.busy_s[NETWORK] == pytest.approx(cost.traffic["sent"] / (whole.gathered / 2))
    unknown = replace(sharded, network=None).cost_of(placed)
    assert NETWORK not in unknown.busy_s


def test_replicas_average_their_shards_when_a_gradient_leaves() -> None:
    shard = Shard(0, 2, replicas=2)
    layout = layout_of(*[2 * SLOT] * CHUNKS, shard=shard)
    network = Network(2, 2, 3.0, 1.0, 10.0, 100.0)
    described = make_plan(layout, network=network)
    cost = described.cost_of(place(GroupSpec(layout, BF16, "cpu", Budgets(AMPLE, 0), 1)))
    bucket = SlotBytes.of(layout, BF16).bucket
    sharing, replicas = bucket / 2 / 3.0, 2 * bucket / 4 / 1.0
    assert cost.busy_s[MEANS] == pytest.approx(CHUNKS * (sharing + 10.0 + replicas + 200.0))
    assert cost.busy_s[NETWORK] == pytest.approx(CHUNKS * replicas)
    forward, backward, update = cost.phases
    assert MEANS not in {name for name, busy in forward.busy_s.items() if busy}
    assert backward.busy_s[MEANS] == cost.busy_s[MEANS]
    # Both levels of the tree that agrees, there and back.
    alone = replace(described, network=None).cost_of(
        place(GroupSpec(layout, BF16, "cpu", Budgets(AMPLE, 0), 1))
    )
    assert update.seconds - alone.phases[2].seconds == pytest.approx(AGREEMENTS * 2 * 110.0)


def test_between_devices_only_shards_cross_the_link() -> None:
    shard = Shard(0, 2)
    layout = layout_of(*[2 * SLOT] * CHUNKS, shard=shard)
    placed = placement((HOST,) * CHUNKS, (HOST,) * CHUNKS, (HOST,) * CHUNKS, slots=1)
    traffic = [
        make_plan(
            layout, separate_profile(), network=Network(2, 1, 1.0, 1.0, between_devices=between)
        )
        .cost_of(placed)
        .traffic
        for between in (False, True)
    ]
    assert traffic[0]["sent"] == traffic[1]["sent"]
    for way in ("h2d", "d2h"):
        assert traffic[0][way] == 2 * traffic[1][way] > 0


@pytest.mark.parametrize("at_end", [False, True])
def test_between_devices_what_is_whole_in_ram_crosses_the_link_for_gathers(at_end: bool) -> None:
    placed = placement((HOST,) * CHUNKS, (HOST,) * CHUNKS, (HOST,) * CHUNKS, slots=CHUNKS)
    costs = []
    for between in (False, True):
        shard = Shard(0, 2, params=False, between_devices=between)
        layout = layout_of(*[2 * SLOT] * CHUNKS, shard=shard)
        made = make_plan(layout, separate_profile())
        spec = replace(made.group.spec, reduce_at_end=at_end)
        costs.append(replace(made, group=replace(made.group, spec=spec)).cost_of(placed))
    slot = SlotBytes.of(layout, BF16)
    assert costs[0].traffic["sent"] == costs[1].traffic["sent"]
    more = {way: costs[1].traffic[way] - costs[0].traffic[way] for way in ("h2d", "d2h")}
    whole, bucket = CHUNKS * slot.gathered, CHUNKS * slot.bucket
    # Of gradients a shard comes down, and not all.
    assert more == {"h2d": whole // 2, "d2h": whole // 2 - bucket // 2}
    update = [cost.phases[2] for cost in costs]
    assert update[1].seconds > update[0].seconds


def test_all_gathers_and_means_share_the_links() -> None:
    """Either stream alone is hidden by compute, both together are not."""
    layout = layout_of(*[2 * SLOT] * 32, shard=Shard(0, 2))
    placed = placement((HOST,) * 32, (HOST,) * 32, (HOST,) * 32, slots=8, bucket_slots=4)
    described = make_plan(layout, network=Network(2, 1, 1.0, 1.0))
    whole_s = SlotBytes.of(layout, BF16).bucket / 2
    computing = Computing(32 * whole_s, 1.5 * 32 * whole_s)
    cost = replace(described, computing=computing).cost_of(placed)
    backward = cost.phases[1]
    assert backward.busy_s[ALL_GATHERS] < backward.busy_s[COMPUTE]
    assert backward.busy_s[MEANS] < backward.busy_s[COMPUTE] < backward.busy_s[NODE_LINKS]
    assert backward.seconds == pytest.approx(backward.busy_s[NODE_LINKS], rel=0.1)
    assert backward.seconds >= backward.busy_s[NODE_LINKS]


def test_frozen_chunks_have_neither_gradient_nor_update():
    layout = layout_of(*[SLOT] * 2, frozen=(0, 1))
    base = make_plan(layout, separate_profile())
    placed = placement((HOST, HOST), (None, None), (None, None), 2)
    cost = base.cost_of(placed)
    # They do not change, so two slots keep them for good.
    assert cost.traffic["h2d"] == cost.traffic["d2h"] == 0
    assert cost.phases[-1].seconds == 0


def test_a_step_without_micro_batches_is_its_update():
    empty = replace(plan(compute_s=(0.0, 0.0)), micro_batches=0)
    cost = empty.cost_of(made())
    assert cost.seconds == pytest.approx(UPDATE_S)


@given(placed_plans())
def test_no_resource_is_busy_longer_than_the_step(placed_plan):
    spec, described = placed_plan
    try:
        cost = described.cost_of(place(spec))
    except PlacementError:
        return
    assert cost.seconds >= max(cost.busy_s.values(), default=0.0) * (1 - 1e-9)


LARGE = layout_of(*[SLOT] * 200)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("share", [0.12, 0.3, 0.6])
@pytest.mark.parametrize("tokens", [1e-3, 3.0, 100.0])
def test_of_many_chunks_each_phase_is_as_long_as_its_busiest_resource(separate, share, tokens):
    host = int(total_bytes(LARGE) * share)
    budgets = Budgets(host, AMPLE, device=host // 3 if separate else None)
    profile = separate_profile() if separate else make_profile()
    described = make_plan(LARGE, profile, tokens=tokens)
    for phase in described.cost_of(place(make_spec(LARGE, budgets))).phases:
        assert phase.seconds <= max(phase.busy_s.values()) * 1.06, phase


def test_forward_goes_in_the_order_of_registration():
    # Chunks are numbered in another order than their parameters come in the model.
    specs = [ParamSpec(i, "m", SLOT, True, group=i) for i in (4, 1, 2)]
    layout = pack(specs, SLOT)
    first = {chunk.id: chunk.slices[0].param.index for chunk in layout.chunks}
    assert [first[chunk] for chunk in make_plan(layout).order] == [1, 2, 4]


def test_computing_is_six_operations_per_parameter_and_token():
    numel = SLOT + SLOT // 2
    layout = pack([ParamSpec(0, "m", numel, True)], 2 * SLOT)
    computing = expected_computing(layout, Work(tokens=10, micro_batches=3), 1e6)
    forward_s = 2 * numel * 30 / 1e6
    assert (computing.forward_s, computing.backward_s) == pytest.approx((forward_s, 2 * forward_s))
    again = expected_computing(layout, Work(10, 3, checkpointing=True), 1e6)
    assert again.backward_s == pytest.approx(3 * forward_s)
    assert computing.expected


def test_a_frozen_parameter_has_no_gradient_to_compute():
    specs = [ParamSpec(0, "frozen", SLOT, False), ParamSpec(1, "trained", SLOT // 4, True)]
    layout = pack(specs, SLOT)
    forward_s = 2 * (SLOT + SLOT // 4) * 30 / 1e6
    computing = expected_computing(layout, Work(tokens=10, micro_batches=3), 1e6)
    assert computing.forward_s == pytest.approx(forward_s)
    assert computing.backward_s == pytest.approx(forward_s + 2 * SLOT // 4 * 30 / 1e6)
