"""Ranks of one machine read each other's memory; where they cannot, gloo brings the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hetero
import hetero.ranks.communicator
from hetero.ranks.collectives import GatheredParts
from hetero.ranks.peer_memory import PeerMemory
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.gathering.transport import GatherTransport
from hetero.state.reduction.means import RankMean
from offload import _native
from tests.support.native.seccomp import refuse
from tests.support.ranks.processes import RankPool
from tests.support.ranks.rank_training import inputs, make

STEPS = 3
_PROCESS_VM_READV = 310 if os.uname().machine == "x86_64" else 270


def train(
    rank: int, world: int, options: dict[str, Any], how: str, replicas: int = 1
) -> dict[str, Any]:
    """`how`: "read", "sent" by gloo, or "refused" by the system to the last rank."""
    where: dict[str, Any] = {}
    if replicas > 1:
        where["mesh"] = init_device_mesh("cpu", (replicas, world // replicas))
    if how == "refused" and rank == world - 1:
        refuse(_PROCESS_VM_READV, errno.EPERM)
    connect = hetero.ranks.communicator.connect_peer_memory
    if how == "sent":
        connect = lambda peers: None  # noqa: E731
    with patch("hetero.ranks.communicator.connect_peer_memory", connect):
        model, optimizer = make("layers", {"chunk_numel": 32768} | options, **where)
    engine = optimizer.engine
    losses = []
    for step in range(STEPS):
        for micro_batch in range(2):
            loss = model(inputs(rank, 10 * step + micro_batch, 128)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "losses": torch.stack(losses),
        "masters": [master.clone() for master in hetero.masters(model.parameters())],
        "reads": all(group.reads_memory for group in engine.world.groups()),
    }
    engine.close()
    return found


def connect(rank: int, world: int, how: str) -> dict[str, Any]:
    """Whether ranks read each other's memory, and what they permitted others to do until then.

    `how`: as the system is ("free"), as it is where one must permit it ("ptrace_scope 1"), where
    nobody may ("ptrace_scope 3"), or with the last rank's environment forbidding it ("unwanted").
    """
    permitted: list[bool] = []
    permit, read = _native.permit_peers_to_read, _native.read_peer_memory

    def noted_permit(may: bool) -> None:
        permitted.append(may)
        permit(may)

    def yama_read(*arguments: int) -> None:
        if how == "ptrace_scope 3" or (how == "ptrace_scope 1" and permitted[-1:] != [True]):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        read(*arguments)

    forbids = how == "unwanted" and rank == world - 1
    with (
        patch.object(_native, "permit_peers_to_read", noted_permit),
        patch.object(_native, "read_peer_memory", yama_read),
        patch.dict(os.environ, {"HETERO_PEER_MEMORY": "0"} if forbids else {}),
    ):
        ranks = ProcessGroups(60.0)
        group = ranks.shard
        assert group is not None
        found = {"reads": group.reads_memory, "connected": list(permitted)}
        ranks.meet("the end")
        ranks.close()
    return found | {"closed": permitted}


class _Noting:
    """A process group; between which pairs of ranks its all-to-alls carry bytes is noted."""

    def __init__(self, group: Any, pairs: set[tuple[int, int]], rank: int) -> None:
        self._group, self._pairs, self._rank = group, pairs, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def alltoall_base(self, into: Any, parts: Any, came: list[int], sent: list[int]) -> Any:
        self._pairs |= {(self._rank, peer) for peer, nbytes in enumerate(sent) if nbytes}
        self._pairs |= {(peer, self._rank) for peer, nbytes in enumerate(came) if nbytes}
        return self._group.alltoall_base(into, parts, came, sent)


def send_both_ways(rank: int, world: int) -> list[set[tuple[int, int]]]:
    """Gathers and exchanges by gloo, checks what came, and returns which pairs each of the groups
    of connections has carried bytes of, a pair as (from, to)."""
    with patch("hetero.ranks.communicator.connect_peer_memory", lambda _: None):
        ranks = ProcessGroups(60.0)
    group = ranks.shard
    assert group is not None
    found: list[set[tuple[int, int]]] = []
    for groups in (group._groups, group._return_groups):
        for channel in (Channel.GRADIENTS, Channel.GATHERS):
            found.append(set())
            groups[channel] = _Noting(groups[channel], found[-1], rank)  # type: ignore[index]
    numel = 5 << 18  # more than a piece
    whole = torch.empty(world * numel)
    part = torch.full((numel,), float(rank))
    group.gather_parts(part, GatheredParts(whole, world), "it", Channel.GATHERS)
    assert torch.equal(whole, torch.arange(float(world)).repeat_interleave(numel))
    sent = torch.arange(float(world)).repeat_interleave(7) + 10 * rank
    came = torch.empty_like(sent)
    group.begin_all_to_all(came, sent, "it", Channel.GRADIENTS).wait()
    for peer, theirs in enumerate(came.chunk(world)):
        assert peer == rank or theirs.eq(10 * peer + rank).all()
    ranks.meet("the end")
    ranks.close()
    return found


def wait_for_one_that_leaves(rank: int, world: int) -> str:
    """Rank 1 leaves while rank 0 waits for it by gloo: what rank 0 is told."""
    with patch("hetero.ranks.communicator.connect_peer_memory", lambda _: None):
        ranks = ProcessGroups(60.0)
    group = ranks.shard
    assert group is not None
    told = ""
    if rank == 0:
        parts = torch.ones(world * 1024)
        begun = group.begin_all_to_all(torch.empty_like(parts), parts, "it", Channel.GRADIENTS)
        both = begun.work
        try:
            begun.wait()
        except hetero.PeerError as error:
            told = str(error)
        assert both.is_completed()  # nothing writes to the memory any more
    else:
        ranks.leave(None)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done/{rank}", "")
    store.wait([f"done/{peer}" for peer in range(world)])
    ranks.close()
    return told


def write_when_let_go(rank: int, world: int) -> int:
    """Gathers again and again from memory that it changes as soon as that is let go.

    Returns how many elements of another rank's came too late.
    """
    ranks = ProcessGroups(60.0)
    group = ranks.shard
    assert group is not None
    transport, numel, wrong = GatherTransport(group), 1 << 18, 0
    let_go = []
    for turn in range(50):
        part, kept = torch.full((numel,), float(10 * turn + rank)), ExitStack()
        kept.callback(part.fill_, -1.0)
        kept.callback(let_go.append, turn)
        whole = torch.empty(world * numel)
        assert transport.gather(GatheredParts(whole, world), part, "it", kept, keeps=True)
        assert let_go == list(range(turn))
        for peer, theirs in enumerate(whole.chunk(world)):
            wrong += int(theirs.ne(10 * turn + peer).sum())
    ranks.meet("the end")
    transport.let_go()
    assert let_go == list(range(50))
    ranks.close()
    return wrong


def read_what_is_freed(rank: int, world: int) -> str:
    """Rank 0 frees what rank 1 has not read yet, which is told so: what it is told."""
    ranks = ProcessGroups(60.0)
    group = ranks.shard
    assert group is not None
    store = dist.distributed_c10d._get_default_store()
    copy, told = PeerMemory._copy, ""

    def copy_later(self: PeerMemory, peer: int, address: int, into: torch.Tensor) -> None:
        store.wait(["freed"])
        copy(self, peer, address, into)

    transport, whole = GatherTransport(group), GatheredParts(torch.empty(2 * 1024), 2)
    with ExitStack() as patches:
        if rank == 1:
            patches.enter_context(patch.object(PeerMemory, "_copy", copy_later))
        part = torch.ones(1024)
        try:
            transport.gather(whole, part, "it", ExitStack(), keeps=True)
        except hetero.PeerError as error:
            told = str(error)
    if rank == 0:
        ranks.leave(None)
        transport.close()
        part.zero_()
        store.set("freed", "")
    store.set(f"done/{rank}", "")
    store.wait([f"done/{1 - rank}"])
    ranks.close()
    return told


def write_afterwards(rank: int, world: int) -> int:
    """Gathers and averages again and again, and changes what it gave as soon as it may.

    Returns how many elements another rank's came too late, or from another turn.
    """
    ranks = ProcessGroups(60.0)
    group = ranks.shard
    assert group is not None
    assert group.reads_memory
    numel = 1 << 18
    wrong = 0
    for turn in range(50):
        part = torch.full((numel,), float(10 * turn + rank))
        whole = torch.empty(world * numel)
        group.gather_parts(part, GatheredParts(whole, world), "it", Channel.GATHERS)
        part.fill_(-1.0)
        for peer, theirs in enumerate(whole.chunk(world)):
            wrong += int(theirs.ne(10 * turn + peer).sum())
        flat = torch.full((world * numel,), float(turn + rank))
        received = torch.empty_like(flat)
        mean = RankMean(ranks, flat, received, torch.empty(numel), None, "a gradient")
        mean.wait()
        made = mean.take()
        flat.fill_(-1.0)
        wrong += int(made.ne(turn + (world - 1) / 2).sum())
    ranks.meet("the end")
    ranks.close()
    return wrong


@pytest.fixture(scope="module")
def pool(ranks_of: Callable[[int], RankPool]) -> RankPool:
    return ranks_of(3)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"zero_stage": 1, "dtype": "fp32"}, id="stage 1, fp32"),
        pytest.param({"zero_stage": 2, "dtype": "bf16"}, id="stage 2", marks=pytest.mark.extra),
        pytest.param({"zero_stage": 3, "dtype": "bf16"}, id="stage 3, bf16"),
    ],
)
def test_the_same_bits_with_and_without(pool: RankPool, options: dict[str, Any]) -> None:
    read = pool.run(train, options, "read")
    sent = pool.run(train, options, "sent")
    for ours, theirs in zip(read, sent, strict=True):
        assert (ours["reads"], theirs["reads"]) == (True, False)
        assert torch.equal(ours["losses"], theirs["losses"])
        for a, b in zip(ours["masters"], theirs["masters"], strict=True):
            assert torch.equal(a, b)


def test_if_the_system_refuses_one_rank_all_send() -> None:
    """A rank that may not read makes all of them use gloo: none waits for what never comes."""
    with RankPool(2) as pool:  # for which that is so for good
        refused = pool.run(train, {}, "refused")
        read = pool.run(train, {}, "read")
    assert [found["reads"] for found in refused] == [False, False]
    for a, b in zip(refused[0]["masters"], read[0]["masters"], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("how", "reads", "connected", "closed"),
    [
        ("free", True, [], []),
        ("ptrace_scope 1", True, [True], [True, False]),
        ("ptrace_scope 3", False, [True, False], [True, False]),
        ("unwanted", False, [], []),
    ],
)
def test_memory_is_opened_to_others_only_where_that_helps(
    pool: RankPool, how: str, reads: bool, connected: list[bool], closed: list[bool]
) -> None:
    for found in pool.run(connect, how):
        assert found == {"reads": reads, "connected": connected, "closed": closed}


def test_hybrid_sharding(ranks4: RankPool) -> None:
    """Replicas read each other's parts, too."""
    read = ranks4.run(train, {}, "read", 2)
    sent = ranks4.run(train, {}, "sent", 2)
    for ours, theirs in zip(read, sent, strict=True):
        assert ours["reads"]
        for a, b in zip(ours["masters"], theirs["masters"], strict=True):
            assert torch.equal(a, b)


def test_by_gloo_no_connection_carries_bytes_in_both_directions(pool: RankPool) -> None:
    """It would carry them in turn, at half the rate of a link."""
    for found in zip(*pool.run(send_both_ways), strict=True):
        pairs = set().union(*found)
        assert pairs
        assert not pairs & {(to, begin) for begin, to in pairs}


def test_a_wait_by_gloo_ends_with_the_other_rank(ranks2: RankPool) -> None:
    told, _ = ranks2.run(wait_for_one_that_leaves)
    assert "rank 1" in told
    assert "needed it for it" in told


def test_memory_is_the_owners_when_all_have_read(ranks2: RankPool) -> None:
    """What a rank writes right after a gather or a mean no other rank has got."""
    assert ranks2.run(write_afterwards) == [0, 0]


def test_memory_that_is_kept_is_let_go_when_all_have_read(ranks2: RankPool) -> None:
    assert ranks2.run(write_when_let_go) == [0, 0]


def test_who_reads_what_its_owner_has_freed_is_told(ranks2: RankPool) -> None:
    first, second = ranks2.run(read_what_is_freed)
    assert first == ""
    assert "rank 0 closed its engine" in second
    assert "needed it for it" in second


def test_memory_that_was_let_go_is_not_written_to() -> None:
    """A gather that a rank does not wait for any more goes on, for the others."""
    whole = torch.zeros(8, dtype=torch.uint8)
    parts = GatheredParts(whole, 2)
    parts.store(0, torch.ones(2, 2, dtype=torch.uint8))
    assert parts.let_go()
    parts.store(2, torch.ones(2, 2, dtype=torch.uint8))
    assert whole.view(2, 4).tolist() == [[1, 1, 0, 0]] * 2
