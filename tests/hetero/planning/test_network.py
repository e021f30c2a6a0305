"""hetero/planning/network: seconds of collectives that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.planning.network import AGREEMENTS, Network
from hetero.planning.profiles import find_profile

# 4 nodes of 8 ranks; a rank's links carry 100 bytes a second, its adapter 10.
NETWORK = Network(8, 4, 100.0, 10.0, 1.0, 5.0)
ONE_NODE = replace(NETWORK, nodes=1)

networks = st.builds(
    Network,
    st.integers(1, 16),
    st.integers(1, 64),
    st.floats(1, 1e12),
    st.floats(1, 1e12),
    st.floats(0, 1),
    st.floats(0, 1),
)
sizes = st.floats(0, 1e12)


def test_a_ring_passes_every_node_once() -> None:
    cost = NETWORK.all_gather(3200.0)
    assert cost.latency_s == 28 * 1.0 + 3 * 5.0
    assert cost.bytes_sent == 3100.0
    assert cost.transfer_s == 3100 / 80  # the adapters of a node together are slower than a link
    assert cost.crosses_nodes
    assert ONE_NODE.all_gather(800.0) == (7.0, 7.0, 700.0, False)


def test_a_pairwise_exchange_sends_all_that_leaves_a_node_by_the_ranks_own_adapter() -> None:
    cost = NETWORK.all_to_all(3200.0)
    assert cost.latency_s == 7 * 1.0 + 24 * 5.0
    assert cost.transfer_s == 2400 / 10
    assert cost.bytes_sent == 3100.0
    inside = ONE_NODE.all_to_all(800.0)
    assert (inside.latency_s, inside.transfer_s) == (7.0, 7.0)


def test_replicas_send_their_shards_between_nodes() -> None:
    _, replicas = NETWORK.groups(8)
    assert (replicas.local_ranks, replicas.nodes) == (1, 4)
    sums, whole = replicas.all_to_all(400.0), replicas.all_gather(400.0)
    assert (sums.latency_s, sums.transfer_s) == (15.0, 30.0)
    assert (whole.latency_s, whole.transfer_s) == (15.0, 30.0)


@pytest.mark.parametrize(
    ("shard_ranks", "sharing", "replicas"),
    [
        (1, (1, 1), (8, 4)),
        (4, (4, 1), (2, 4)),
        (8, (8, 1), (1, 4)),
        (16, (8, 2), (1, 2)),
        (32, (8, 4), (1, 1)),
    ],
)
def test_groups_are_parts_of_nodes_or_whole_nodes(
    shard_ranks: int, sharing: tuple[int, int], replicas: tuple[int, int]
) -> None:
    shard_group, replica_group = NETWORK.groups(shard_ranks)
    assert (shard_group.local_ranks, shard_group.nodes) == sharing
    assert (replica_group.local_ranks, replica_group.nodes) == replicas


@pytest.mark.parametrize("shard_ranks", [3, 12, 24])
def test_other_groups_are_refused(shard_ranks: int) -> None:
    with pytest.raises(ValueError, match="choose parts of a node, or whole nodes"):
        NETWORK.groups(shard_ranks)


def test_an_agreement_grows_with_the_logarithm_of_the_ranks() -> None:
    assert NETWORK.agreement_s() == AGREEMENTS * 2 * (3 * 1.0 + 2 * 5.0)
    assert Network(nodes=1, node_bytes_per_s=1.0).agreement_s() == 0.0


@given(networks, sizes, st.integers(1, 3))
def test_more_nodes_slower_links_and_more_bytes_take_no_less(
    network: Network, nbytes: float, more: int
) -> None:
    for collective in (Network.all_gather, Network.all_to_all):
        seconds = collective(network, nbytes).seconds * (1 - 1e-9)
        assert collective(network, nbytes * more).seconds >= seconds
        slower = replace(
            network,
            rank_bytes_per_s=network.rank_bytes_per_s / more,
            node_bytes_per_s=network.node_bytes_per_s / more,
        )
        assert collective(slower, nbytes).seconds >= seconds
        # Behind slow links in a node more nodes would leave less for those.
        if network.nodes > 1 and network.rank_bytes_per_s >= network.node_bytes_per_s * 16:
            several = replace(network, nodes=more * network.nodes)
            assert collective(several, nbytes).seconds >= seconds


def test_the_network_of_a_profile_is_as_much_as_it_says() -> None:
    profile = find_profile("8xh200-node")
    made = Network.of(profile, 8, 64)
    assert made is not None
    assert (made.ranks, made.between_devices) == (512, True)
    assert made.node_latency_s == profile.node_latency_s
    # Profiles of before have no latencies, and some no links inside a node.
    silent = replace(profile, rank_latency_s=None, node_latency_s=None, rank_bytes_per_s=None)
    assert Network.of(silent, 8, 1) is None
    only_between = Network.of(silent, 8, 2)
    assert only_between is not None
    assert only_between.all_gather(16.0).latency_s == 0.0
    assert only_between.all_gather(16.0).transfer_s == 15 / (8 * 45e9)
    assert Network.of(replace(profile, node_bytes_per_s=None), 8, 2) is None
