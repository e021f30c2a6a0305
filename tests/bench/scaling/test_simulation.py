"""bench/scaling: simulated steps that can be worked out by hand, and beside predicted ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scaling.cases import Case, schedule_of, two_level_means
from bench.scaling.simulation import (
    Collective,
    Schedule,
    Use,
    disturbed_s,
    simulate,
)
from hetero.planning.belady import PREFETCH_CHUNKS
from hetero.planning.collective_cost import CollectiveCost
from hetero.planning.profiles import find_profile

CHUNKS = 12


def cost(latency_s: float = 0.0, transfer_s: float = 0.0) -> CollectiveCost:
    return CollectiveCost(latency_s, transfer_s, 1.0, crosses_nodes=True)


def schedule(
    ranks: int = 4,
    replicas: int = 1,
    gather: CollectiveCost | None = None,
    mean: CollectiveCost | None = None,
    replicas_s: float = 0.0,
    end_s: float = 0.0,
    buckets: int = CHUNKS,
    ahead: int = PREFETCH_CHUNKS,
) -> Schedule:
    """CHUNKS chunks that compute 1 second in forward and 2 in backward, all gathered both times."""
    uses = []
    count = 2 * CHUNKS
    for number in range(count):
        # Gather 0 is demanded, and each use prefetches the one that comes `ahead` of it.
        first = range(1, min(ahead, count - 1) + 1) if number == 0 else [number + ahead]
        prefetched = tuple(each for each in first if each < count) if ahead else ()
        demanded = (number,) if number == 0 or not ahead else ()
        backward = number >= CHUNKS
        uses.append(
            Use(
                2.0 if backward else 1.0,
                number,
                demanded,
                prefetched,
                number - CHUNKS if backward else None,
            )
        )
    gathers = (Collective(gather or cost()),) * count
    means = tuple(
        Collective(mean or cost(), replicas_s=replicas_s, bucket=max(-1, number - buckets))
        for number in range(CHUNKS)
    )
    return Schedule(tuple(uses), gathers, means, ranks, replicas, end_s)


def test_collectives_that_take_no_time_leave_compute_and_the_update() -> None:
    made = schedule(end_s=5.0)
    assert made.computing_s == 3 * CHUNKS
    assert simulate(made) == 3 * CHUNKS + 5.0


@pytest.mark.parametrize("prefetch", [0, PREFETCH_CHUNKS])
def test_gathers_that_take_longer_than_compute_come_one_after_the_other(prefetch: int) -> None:
    made = schedule(gather=cost(latency_s=1.0, transfer_s=3.0), ahead=prefetch)
    hidden = 0.0 if prefetch else made.computing_s - 2.0
    # The last use computes when the last gather has come; what is gathered on demand hides nothing.
    assert simulate(made) == pytest.approx(2 * CHUNKS * 4.0 + 2.0 + hidden)


def test_means_are_hidden_but_for_the_last_one() -> None:
    made = schedule(mean=cost(0.5, 1.0))
    assert simulate(made) == pytest.approx(3 * CHUNKS + 1.5)


def test_without_buckets_backward_waits_for_each_mean() -> None:
    made = schedule(mean=cost(0.5, 1.0), buckets=1)
    assert simulate(made) == pytest.approx(3 * CHUNKS + CHUNKS * 1.5)
    assert simulate(schedule(mean=cost(0.5, 1.0), buckets=2)) == pytest.approx(3 * CHUNKS + 1.5)


def test_two_streams_share_a_link_and_not_their_latency() -> None:
    alone = schedule(gather=cost(0.0, 1.5), mean=cost(0.0, 0.0))
    both = schedule(gather=cost(0.0, 1.5), mean=cost(0.0, 1.5))
    latency = schedule(gather=cost(0.0, 1.5), mean=cost(1.5, 0.0))
    assert simulate(both) >= 3 * CHUNKS * 1.5
    assert simulate(latency) <= simulate(alone) + 1.5
    assert simulate(both) > simulate(latency) + 5.0


def test_a_slower_rank_is_the_step_where_compute_is_all() -> None:
    made = schedule(end_s=1.0)
    slower_s = disturbed_s(made, slower=0.25)
    assert simulate(made, slower_s) == pytest.approx(1.25 * 3 * CHUNKS + 1.0)
    assert slower_s.sum(axis=0) == pytest.approx([1.25 * 3 * CHUNKS] + [3 * CHUNKS] * 3)


def test_a_slower_rank_is_hidden_where_gathers_take_longer() -> None:
    made = schedule(gather=cost(4.0))
    slower = simulate(made, disturbed_s(made, slower=0.25))
    assert slower == pytest.approx(simulate(made) + 0.5)  # the last use alone


def test_a_rank_that_stands_still_holds_all_up() -> None:
    made = schedule(ranks=4, replicas=2)
    assert simulate(made, disturbed_s(made, stall_s=7.0)) == pytest.approx(3 * CHUNKS + 7.0)
    gathered = schedule(gather=cost(0.5))
    # With all gathers there already the other ranks come as far as buckets allow.
    assert simulate(gathered, disturbed_s(gathered, stall_s=7.0)) == pytest.approx(
        3 * CHUNKS + 7.0 + 0.5
    )


def test_replicas_wait_for_the_last_of_them() -> None:
    made = schedule(ranks=2, replicas=3, replicas_s=0.25)
    assert simulate(made) == pytest.approx(3 * CHUNKS + 0.25)
    slower_s = simulate(made, disturbed_s(made, slower=0.5))
    assert slower_s == pytest.approx(1.5 * 3 * CHUNKS + 0.25)


def test_ranks_that_gather_on_demand_begin_each_use_together() -> None:
    demanded = schedule(ranks=64, ahead=0)
    each_s = disturbed_s(demanded, jitter=0.3)
    in_step_s = each_s.max(axis=1).sum()
    assert simulate(demanded, each_s) == pytest.approx(in_step_s)
    # Prefetches let ranks drift apart, and without collectives only the step's end holds them up.
    ahead_s = simulate(schedule(ranks=64), each_s)
    assert each_s.sum(axis=0).max() <= ahead_s < in_step_s
    free = replace(demanded, uses=tuple(use._replace(gather=None) for use in demanded.uses))
    assert simulate(free, each_s) == pytest.approx(each_s.sum(axis=0).max())


def test_jitter_repeats_with_its_seed_and_has_its_size() -> None:
    made = schedule(ranks=512)
    seconds = [disturbed_s(made, jitter=0.1, seed=seed) for seed in (1, 1, 2)]
    assert (seconds[0] == seconds[1]).all()
    assert (seconds[0] != seconds[2]).any()
    relative = seconds[0] / np.array([use.computing_s for use in made.uses])[:, None]
    assert relative.mean() == pytest.approx(1.0, abs=0.01)
    assert relative.std() == pytest.approx(0.1, abs=0.01)


latencies = st.floats(0, 10)


@settings(max_examples=100, deadline=None)
@given(latencies, latencies, latencies, st.integers(1, CHUNKS), st.integers(0, 5))
def test_a_step_is_at_least_what_each_part_of_it_takes(
    gather_s: float, mean_s: float, replicas_s: float, buckets: int, ahead: int
) -> None:
    made = schedule(
        2,
        2,
        cost(gather_s / 2, gather_s / 2),
        cost(mean_s / 2, mean_s / 2),
        replicas_s,
        buckets=buckets,
        ahead=ahead,
    )
    seconds = simulate(made) * (1 + 1e-9)
    assert seconds >= made.computing_s
    assert seconds >= 2 * CHUNKS * gather_s
    assert seconds >= CHUNKS * (mean_s + replicas_s)
    assert seconds >= 2 * CHUNKS * gather_s / 2 + CHUNKS * mean_s / 2
    everything = 2 * CHUNKS * gather_s + CHUNKS * (mean_s + replicas_s) + made.computing_s
    assert simulate(made) <= everything * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(latencies, latencies, latencies),
    st.tuples(latencies, latencies, latencies),
    st.floats(0, 1),
    st.integers(1, CHUNKS - 1),
    st.integers(1, 4),
)
def test_more_latency_fewer_buckets_and_slower_ranks_take_no_less(
    latency: tuple[float, float, float],
    more: tuple[float, float, float],
    slower: float,
    buckets: int,
    ahead: int,
) -> None:
    def seconds(of: tuple[float, ...], slower: float, buckets: int, ahead: int) -> float:
        gather, mean, replicas_s = cost(of[0]), cost(of[1]), of[2]
        made = schedule(2, 2, gather, mean, replicas_s, buckets=buckets, ahead=ahead)
        return simulate(made, disturbed_s(made, slower=slower))

    first = seconds(latency, slower, buckets + 1, ahead + 1)
    added = tuple(a + b for a, b in zip(latency, more, strict=True))
    assert seconds(added, slower, buckets + 1, ahead + 1) >= first - 1e-6
    assert seconds(latency, slower + 0.5, buckets + 1, ahead + 1) >= first - 1e-6
    assert seconds(latency, slower, buckets, ahead + 1) >= first - 1e-6
    assert seconds(latency, slower, buckets + 1, ahead) >= first - 1e-6


PROFILE = find_profile("8xh200-node")
# What the cost model may be away from the simulation of the same order, without stragglers.
TOLERANCE = 0.05


@pytest.mark.parametrize("nodes", [1, 8, 64])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case("llama-7b", 1),
        Case("llama-7b", 1, micro_batches=4),
        Case("llama-7b", 1, chunk_numel=64 << 20),
        Case("llama-13b", 1, sequences=4),
        Case("llama-13b", 1, chunk_numel=1 << 20),
        Case("llama-70b", 1),
        Case("opt-30b", 1, device_bytes=20 << 30),
        Case("llama-70b", 1, host_bytes=24 << 30, device_bytes=18 << 30, micro_batches=2),
    ],
    ids=str,
)
def test_predicted_steps_are_near_the_simulated_ones(case: Case, nodes: int, hybrid: bool) -> None:
    plan = replace(case, nodes=nodes, hybrid=hybrid).plan(PROFILE)
    simulated_s = simulate(schedule_of(plan.problem, plan.placement))
    assert plan.cost.seconds == pytest.approx(simulated_s, rel=TOLERANCE)


def test_means_in_two_levels_take_less_where_ranks_share_over_machines() -> None:
    plan = Case("llama-7b", 8).plan(PROFILE)
    made = schedule_of(plan.problem, plan.placement)
    whole, levels = (each.means[0].cost for each in (made, two_level_means(made, plan)))
    assert levels.latency_s < whole.latency_s
    # Eight ranks of a machine send an eighth of what they did to others, beside 7/8 inside.
    inside_s = whole.bytes_sent * 64 / 63 * 7 / 8 / 400e9
    assert levels.transfer_s == pytest.approx(whole.transfer_s / 8 + inside_s)
    one = Case("llama-7b", 1).plan(PROFILE)
    alone = schedule_of(one.problem, one.placement)
    assert two_level_means(alone, one) is alone
    assert math.isfinite(simulate(two_level_means(made, plan)))
