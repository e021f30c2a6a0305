"""Chunk groups to place and steps to predict: small ones in round numbers, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import WHOLE, Layout, ParamSpec, Shard, pack
from hetero.overlap import OverlapUpdates
from hetero.planning.candidates import place
from hetero.planning.group_plans import ChunkGroupPlan
from hetero.planning.network import Network
from hetero.planning.placement import Budgets, GroupSpec, Placement, SlotBytes
from hetero.planning.step_cost import Plan, Work, expected_computing
from offload.memory.tiers import Tier
from offload.profile.machine_profile import Profile

SLOT = 4096
AMPLE = 1 << 50
BF16 = Dtypes("bf16", "bf16")


def make_profile(**changes) -> Profile:
    """A CPU machine: disk 1 and 2 and 1.5 bytes per unit of time, update 10."""
    values = {
        "name": "made up",
        "date": "2026-01-01",
        "source": "a test",
        "devices": 1,
        "threads": 1,
        "dram_bytes_per_s": 20.0,
        "nvme_read_bytes_per_s": 2.0,
        "nvme_write_bytes_per_s": 1.0,
        "nvme_mixed_bytes_per_s": 1.5,
        "h2d_bytes_per_s": None,
        "d2h_bytes_per_s": None,
        "rank_bytes_per_s": None,
        "node_bytes_per_s": None,
        "update_bytes_per_s": {"bf16": 10.0, "fp32": 10.0, "fp16": 10.0},
        "device_update_bytes_per_s": None,
        "matmul_flop_per_s": {"bf16": 1.0, "fp32": 1.0, "fp16": 1.0},
        "host_bytes": AMPLE,
        "device_bytes": None,
        "nvme_bytes": AMPLE,
    }
    return Profile(**{**values, **changes})


def separate_profile(**changes) -> Profile:
    """The same with a device that has memory of its own."""
    device = {
        "h2d_bytes_per_s": 4.0,
        "d2h_bytes_per_s": 5.0,
        "device_bytes": AMPLE,
        "device_update_bytes_per_s": {"bf16": 100.0, "fp32": 100.0, "fp16": 100.0},
    }
    return make_profile(**{**device, **changes})


def layout_of(*numels: int, frozen: tuple[int, ...] = (), shard: Shard = WHOLE) -> Layout:
    """One chunk for each parameter of so many elements."""
    specs = [ParamSpec(i, f"p{i}", n, i not in frozen, group=i) for i, n in enumerate(numels)]
    return pack(specs, SLOT * shard.ranks, shard)


def make_spec(layout: Layout, budgets: Budgets, policy: str = "auto", **more) -> GroupSpec:
    """A chunk group in bf16 in which each module needs one chunk at a time."""
    longest = max(c.slots for c in layout.chunks)
    return GroupSpec(layout, BF16, policy, budgets, longest, **more)


def make_plan(
    layout: Layout,
    profile: Profile | None = None,
    tokens: float = 1e-3,
    micro_batches: int = 1,
    spec: GroupSpec | None = None,
    **more,
) -> Plan:
    """A step of `spec` as it is placed; without one of a placement that cost_of() is given."""
    profile = make_profile() if profile is None else profile
    rate = profile.rate("matmul_flop_per_s", "bf16") / tokens
    homes = (Tier.HOST,) * len(layout.chunks)
    placed = Placement(param=homes, grad=homes, optim_state=homes) if spec is None else place(spec)
    return Plan(
        ChunkGroupPlan(spec or make_spec(layout, Budgets(AMPLE, AMPLE)), placed),
        expected_computing(layout, Work(1, micro_batches), rate),
        micro_batches,
        profile,
        **more,
    )


def total_bytes(layout: Layout) -> int:
    slot = SlotBytes.of(layout, BF16)
    trained = sum(c.slots for c in layout.chunks if c.trainable)
    return layout.slot_count * slot.param + trained * (slot.grad + slot.optim_state)


SHARDS = (WHOLE, WHOLE, Shard(0, 2), Shard(0, 2, params=False), Shard(0, 2, replicas=2))
rates = st.floats(0.1, 100)


@st.composite
def profiles(draw) -> Profile:
    """Any rates; some machines have a device with memory of its own."""
    read, write, update = draw(rates), draw(rates), draw(rates)
    given = {
        "nvme_read_bytes_per_s": read,
        "nvme_write_bytes_per_s": write,
        "nvme_mixed_bytes_per_s": (read + write) / 2,
        "update_bytes_per_s": {"bf16": update},
    }
    if not draw(st.booleans()):
        return make_profile(**given)
    link = {"h2d_bytes_per_s": draw(rates), "d2h_bytes_per_s": draw(rates)}
    return separate_profile(**given, **link, device_update_bytes_per_s={"bf16": update * 9})


def networks_of(shard: Shard) -> st.SearchStrategy[Network | None]:
    """Networks of the ranks that have the shards; None where none is known."""
    ranks = shard.ranks * shard.replicas
    seconds = st.floats(0, 10)
    shapes = [(local, ranks // local) for local in range(1, ranks + 1) if ranks % local == 0]
    return st.none() | st.builds(
        lambda shape, *rest: Network(*shape, *rest),
        st.sampled_from(shapes),
        rates,
        rates,
        seconds,
        seconds,
        st.booleans(),
    )


@st.composite
def placed_plans(draw, most_chunks: int = 10, policies=("cpu", "nvme", "auto")):
    """(what to place, its step), with budgets from far too small to more than enough."""
    numels = st.integers(1, SLOT) | st.integers(SLOT + 1, 3 * SLOT)
    sizes = draw(st.lists(numels, min_size=1, max_size=most_chunks))
    frozen = draw(st.sets(st.integers(0, most_chunks), max_size=2))
    shard = draw(st.sampled_from(SHARDS))
    layout = layout_of(*sizes, frozen=tuple(frozen), shard=shard)
    profile = draw(profiles())
    within = st.floats(0, 1.5).map(lambda share: int(total_bytes(layout) * share))
    budgets = Budgets(
        host=draw(within),
        disk=draw(st.sampled_from([0, AMPLE, AMPLE]) | within),
        device=draw(within) if profile.separate else None,
        keep_optim_states=draw(st.booleans()),
        under_construction=draw(st.booleans()),
    )
    plan = make_plan(
        layout,
        profile,
        tokens=draw(st.floats(1e-3, 10)),
        micro_batches=draw(st.sampled_from([1, 1, 2, 3, 7])),
        prefetch=draw(st.booleans()),
        overlap=draw(st.sampled_from(OverlapUpdates)),
        network=draw(networks_of(shard)),
    )
    spec = make_spec(
        layout,
        budgets,
        draw(st.sampled_from(policies)),
        reduce_at_end=shard.ranks > 1 and draw(st.booleans()),
        overlaps_updates=plan.overlap.repeats,
    )
    return spec, plan
