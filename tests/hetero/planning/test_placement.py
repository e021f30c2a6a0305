"""hetero/planning/placement: it fits, follows the policy, and is refused with true numbers."""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout, ParamSpec, pack
from hetero.planning.candidates import place
from hetero.planning.placement import (
    Budgets,
    GroupSpec,
    Placement,
    SlotBytes,
    concurrent_slots,
    link_buffers,
)
from offload._native import StepPipeline
from offload.errors import BudgetError
from offload.memory.tiers import Tier

SLOT = 4096
AMPLE = 1 << 50
NAMES = ("bf16", "fp16", "fp32")


def placed(*spec, **more) -> Placement:
    """The placement of a GroupSpec of these fields."""
    return place(GroupSpec(*spec, **more))


dtypes = st.builds(Dtypes, st.sampled_from(NAMES), st.sampled_from(NAMES))
policies = st.sampled_from(["cpu", "nvme", "auto"])
numels = st.integers(1, 400) | st.integers(SLOT // 2, SLOT) | st.integers(SLOT + 1, 4 * SLOT)


@st.composite
def layouts(draw) -> Layout:
    pairs = draw(st.lists(st.tuples(numels, st.integers(0, 3)), min_size=1, max_size=12))
    return pack([ParamSpec(i, f"p{i}", n, bool(t)) for i, (n, t) in enumerate(pairs)], SLOT)


def total_bytes(layout: Layout, dtypes: Dtypes) -> int:
    slot = SlotBytes.of(layout, dtypes)
    trained = sum(c.slots for c in layout.chunks if c.trainable)
    return layout.slot_count * slot.param + trained * (slot.grad + slot.optim_state)


@st.composite
def problems(draw):
    """Arguments of placed(), with budgets from far too small to more than enough."""
    layout, d = draw(layouts()), draw(dtypes)
    total = total_bytes(layout, d)
    within = st.floats(0, 1.6).map(lambda share: int(total * share))
    longest = max(c.slots for c in layout.chunks)
    budgets = Budgets(
        host=draw(within),
        disk=draw(st.sampled_from([0, AMPLE, AMPLE]) | within),
        gathered=draw(st.none() | st.none() | within),
        keep_optim_states=draw(st.booleans()),
    )
    return layout, d, draw(policies), budgets, longest + draw(st.integers(0, 5))


def homed_bytes(layout: Layout, d: Dtypes, p: Placement, tier: Tier) -> int:
    slot = SlotBytes.of(layout, d)
    state_kinds = ((p.param, slot.param), (p.grad, slot.grad), (p.optim_state, slot.optim_state))
    return sum(
        chunk.slots * nbytes
        for homes, nbytes in state_kinds
        for chunk in layout.chunks
        if homes[chunk.id] is tier
    )


def pool_bytes(layout: Layout, d: Dtypes, p: Placement) -> int:
    """By the pipeline's own account of what a buffer takes."""
    trained_on_disk = any(p.param[c.id] is Tier.DISK and c.trainable for c in layout.chunks)
    buffer = StepPipeline.buffer_bytes(
        d.kind, layout.slot_numel, trained_on_disk, Tier.DISK in p.grad
    )
    slot = SlotBytes.of(layout, d)
    return p.buffers * buffer + p.gathered_slots * slot.param + p.grad_slots * slot.grad


def construction_peak(layout: Layout, d: Dtypes, disk: int) -> int:
    """What must be in RAM, in fp32, while the model is built and its chunks are made."""
    if disk:
        return max(s.param.numel * 4 for c in layout.chunks for s in c.slices)
    # Chunk by chunk: its slots are made, then the parameters it was made from go.
    slot = SlotBytes.of(layout, d)
    held = peak = sum(s.param.numel * 4 for c in layout.chunks for s in c.slices)
    for chunk in layout.chunks:
        held += chunk.slots * slot.param
        held += chunk.slots * slot.optim_state if chunk.trainable else 0
        peak = max(peak, held)
        held -= sum(s.param.numel * 4 for s in chunk.slices)
    return peak


@given(problems())
def test_what_is_placed_fits_is_counted_right_and_follows_the_policy(problem):
    layout, d, policy, budgets, min_gathered = problem
    try:
        p = placed(layout, d, policy, budgets, min_gathered)
    except BudgetError:
        return
    assert p.host_bytes <= budgets.host
    assert p.disk_bytes <= budgets.disk
    slot = SlotBytes.of(layout, d)
    if budgets.gathered is not None:
        assert p.gathered_slots * slot.param <= budgets.gathered
    assert p.disk_bytes == homed_bytes(layout, d, p, Tier.DISK)
    at_rest = homed_bytes(layout, d, p, Tier.HOST) + pool_bytes(layout, d, p)
    assert p.host_bytes == max(at_rest, construction_peak(layout, d, budgets.disk))
    n = len(layout.chunks)
    assert len(p.param) == len(p.grad) == len(p.optim_state) == n
    for chunk in layout.chunks:
        homes = {p.grad[chunk.id], p.optim_state[chunk.id]}
        assert (homes == {None}) is (not chunk.trainable)
        assert homes <= {None, Tier.HOST, Tier.DISK}
        assert p.param[chunk.id] in (Tier.HOST, Tier.DISK)
    if policy == "cpu":
        assert p.disk_bytes == 0
    if policy == "nvme":
        assert Tier.HOST not in p.optim_state
    # Pools are there exactly for what needs them, and large enough for any one chunk.
    assert (p.gathered_slots > 0) is (Tier.DISK in p.param)
    assert p.gathered_slots in (0, *range(min_gathered, min_gathered + 3))
    assert (p.grad_slots > 0) is (Tier.DISK in p.grad)
    if p.grad_slots:
        assert p.grad_slots >= max(c.slots for c in layout.chunks if c.trainable)
    steps_from_file = Tier.DISK in p.grad or Tier.DISK in p.optim_state or p.trained_param_on_disk
    assert (p.buffers > 0) is steps_from_file
    assert p.trained_param_on_disk is any(
        p.param[c.id] is Tier.DISK for c in layout.chunks if c.trainable
    )
    if not budgets.keep_optim_states:
        assert p.buffers <= 4


def quoted(refusal: BudgetError, pattern: str) -> int | None:
    found = re.search(pattern, str(refusal))
    return int(found[1]) if found else None


def smallest_in(refusal: BudgetError) -> int | None:
    return quoted(refusal, r"the smallest that works is [^(]*\((\d+) bytes\)")


def refusal_of(problem) -> BudgetError | None:
    try:
        placed(*problem)
    except BudgetError as refusal:
        return refusal
    return None


@given(problems(), st.floats(0, 1))
def test_with_little_disk_the_two_numbers_quoted_work_together(problem, share):
    layout, d, policy, budgets, min_gathered = problem
    disk = 1 + int(share * total_bytes(layout, d))
    budgets = replace(budgets, disk=disk, gathered=None)
    refusal = refusal_of((layout, d, policy, budgets, min_gathered))
    if refusal is not None:
        host = smallest_in(refusal) or budgets.host
        disk = quoted(refusal, r"\((\d+) bytes\) go to disk") or budgets.disk
        assert host > budgets.host or disk > budgets.disk
        placed(layout, d, policy, replace(budgets, host=host, disk=disk), min_gathered)
        if host > budgets.host:
            with pytest.raises(BudgetError):
                placed(layout, d, policy, replace(budgets, host=host - 1), min_gathered)
        elif policy == "nvme":
            with pytest.raises(BudgetError):
                placed(layout, d, policy, replace(budgets, disk=disk - 1), min_gathered)


# Budgets in steps of what makes a difference.
more_bytes = st.integers(1, 400).map(lambda n: n * SLOT * 2)


@given(problems(), more_bytes)
def test_what_fits_fits_with_more_host_memory_too(problem, more):
    layout, d, policy, budgets, min_gathered = problem
    # With a file that is only just large enough this does not hold: what a larger budget has for
    # a large chunk it may take from small ones, which then go to disk.
    budgets = replace(budgets, disk=AMPLE if budgets.disk else 0)
    if refusal_of((layout, d, policy, budgets, min_gathered)) is None:
        larger = replace(budgets, host=budgets.host + more)
        placed(layout, d, policy, larger, min_gathered)


@given(problems(), more_bytes)
def test_what_fits_fits_in_the_same_way_with_a_larger_file(problem, more):
    layout, d, policy, budgets, min_gathered = problem
    if budgets.disk and refusal_of(problem) is None:
        fits = placed(*problem)
        larger = replace(budgets, disk=budgets.disk + more)
        assert placed(layout, d, policy, larger, min_gathered).disk_bytes >= fits.disk_bytes


@given(problems(), more_bytes)
def test_more_host_memory_goes_to_homes_up_to_the_pools_and_a_chunk(problem, more):
    layout, d, policy, budgets, min_gathered = problem
    budgets = replace(budgets, disk=AMPLE)
    try:
        less = placed(layout, d, policy, budgets, min_gathered)
    except BudgetError:
        return
    larger = replace(budgets, host=budgets.host + more)
    now = placed(layout, d, policy, larger, min_gathered)
    pools = max(0, pool_bytes(layout, d, now) - pool_bytes(layout, d, less))
    slot = SlotBytes.of(layout, d)
    state_kind = max(slot.param, slot.grad, slot.optim_state if policy == "auto" else 0)
    one_chunk = max(c.slots for c in layout.chunks) * state_kind
    assert now.disk_bytes <= less.disk_bytes + pools + one_chunk


@given(problems())
def test_auto_uses_no_disk_where_ram_is_enough_for_all(problem):
    layout, d, _, budgets, min_gathered = problem
    everything = max(total_bytes(layout, d), construction_peak(layout, d, 0))
    for disk in (0, AMPLE):
        budgets = replace(budgets, host=everything, disk=disk)
        for policy in ("cpu", "auto"):
            assert placed(layout, d, policy, budgets, min_gathered).disk_bytes == 0


class TestRefusals:
    LAYOUT = pack([ParamSpec(i, f"p{i}", SLOT, True) for i in range(10)], SLOT)
    BF16 = Dtypes("bf16", "bf16")

    def refusal(self, policy: str, budgets: Budgets) -> str:
        with pytest.raises(BudgetError) as refusal:
            placed(self.LAYOUT, self.BF16, policy, budgets, 1)
        return str(refusal.value)

    @pytest.mark.parametrize(
        ("policy", "budgets", "needed", "said"),
        [
            ("cpu", Budgets(SLOT, 0), 14, "'nvme' or 'auto' with nvme_path"),
            ("auto", Budgets(SLOT, 0), 14, "give nvme_path, or raise host_memory"),
            ("nvme", Budgets(AMPLE, SLOT), 10, "nvme_capacity"),
        ],
    )
    def test_what_is_needed_and_what_helps_is_told(self, policy, budgets, needed, said):
        message = self.refusal(policy, budgets)
        assert "40,960 parameters in 10 chunks" in message
        assert f"({10 * SLOT * needed} bytes)" in message
        assert said in message


def test_buffers_of_the_link_are_in_ram():
    """Also where all is on DEVICE: it may have to move."""
    layout = pack([ParamSpec(i, f"p{i}", SLOT - i, True) for i in range(10)], SLOT)
    large = pack([ParamSpec(0, "p0", 5 << 20, True)], SLOT)
    dtypes = Dtypes("bf16", "bf16")
    assert link_buffers(layout, dtypes) == (4, SLOT)  # of two gradients
    assert link_buffers(large, dtypes) == (8, 1 << 20)
    nbytes = 4 * SLOT
    for policy in ("auto", "cuda"):
        p = placed(layout, dtypes, policy, Budgets(AMPLE, 0, device=AMPLE), 1)
        assert set(p.optim_state) == {Tier.DEVICE}
        assert p.pool_bytes == nbytes
    with_device = placed(layout, dtypes, "cpu", Budgets(AMPLE, 0, device=AMPLE), 1)
    without = placed(layout, dtypes, "cpu", Budgets(AMPLE, 0), 1)
    assert with_device.pool_bytes - without.pool_bytes == nbytes


class TestKeptRecords:
    """RAM that is left keeps optimizer states between steps, in more buffers."""

    LAYOUT = pack([ParamSpec(i, f"p{i}", SLOT, True) for i in range(10)], SLOT)
    BF16 = Dtypes("bf16", "bf16")

    @pytest.mark.parametrize("spare", range(9))
    def test_each_spare_record_s_bytes_keep_one_more(self, spare):
        host = 10 * SLOT * 4 + (4 + spare) * SLOT * 10
        p = placed(self.LAYOUT, self.BF16, "nvme", Budgets(host, AMPLE), 1)
        assert set(p.param) == set(p.grad) == {Tier.HOST}
        assert p.buffers == min(10, 4 + spare)

    def test_only_where_they_are_wanted(self):
        p = placed(
            self.LAYOUT, self.BF16, "nvme", Budgets(AMPLE, AMPLE, keep_optim_states=False), 1
        )
        assert p.buffers == 4


# Pins in the worst places.


def always_finds_room(slots: int, runs: tuple[int, ...]) -> bool:
    """Whether the runs, pinned one after the other wherever they fit, never leave one out."""

    def fits(taken: frozenset[int], run: int) -> list[frozenset[int]]:
        windows = (frozenset(range(s, s + run)) for s in range(slots - run + 1))
        return [taken | w for w in windows if not taken & w]

    seen: set[tuple[frozenset[int], tuple[int, ...]]] = set()
    stack = [(frozenset[int](), tuple(sorted(runs)))]
    while stack:
        taken, waiting = stack.pop()
        if (taken, waiting) in seen:
            continue
        seen.add((taken, waiting))
        for i in range(len(waiting)):
            rest = waiting[:i] + waiting[i + 1 :]
            choices = fits(taken, waiting[i])
            if not choices:
                return False
            stack += [(choice, rest) for choice in choices]
    return True


def chunks_of(runs: tuple[int, ...]) -> list[Chunk]:
    return [Chunk(i, run, (), True) for i, run in enumerate(runs)]


@pytest.mark.parametrize(
    "runs",
    [r for k in (1, 2, 3) for r in itertools.combinations_with_replacement((1, 2, 3), k)]
    + [(1, 1, 1, 1), (1, 1, 1, 2), (4, 1), (4, 4)],
)
def test_concurrent_slots_are_the_fewest_that_always_find_room(runs):
    need = concurrent_slots([chunks_of(runs)])
    assert always_finds_room(need, runs)
    assert not always_finds_room(need - 1, runs)


def test_concurrent_slots_of_several_sets_are_those_of_the_worst():
    sets = [(1, 1), (3,), (2, 1)]
    each = [concurrent_slots([chunks_of(runs)]) for runs in sets]
    assert concurrent_slots(chunks_of(runs) for runs in sets) == max(each)
    assert concurrent_slots([]) == 1
