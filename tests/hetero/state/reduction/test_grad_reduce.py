"""Gradients of ranks that are threads: any arrivals, in any order, become the plain mean."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout, ParamSpec, Shard, pack
from hetero.overlap import OverlapUpdates
from hetero.ranks.communicator import Communicator
from hetero.ranks.peers import Channel
from hetero.ranks.waiting import FailedRanks, WhileWaiting
from hetero.state.chunk_updates import ChunkUpdates, chunk_states
from hetero.state.grads import Grads, LossScale
from hetero.state.managed_param import ManagedParam
from hetero.state.memory import Homes
from hetero.state.reduction.grad_reduce import GradReducer
from hetero.state.reduction.means import ReduceBuffers
from offload._native import sum_of_squares
from offload.cache.slot_cache import SlotCache
from offload.device.backend import CpuBackend, EmulatedBackend
from offload.device.grad_offload import BUFFERS, GradOffload
from offload.errors import HeteroError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.slot_pool import SlotPool
from offload.memory.tiers import Account, StateKind, Tier
from tests.support.waiting import PATIENCE_S

FP32 = Dtypes("fp32", grad="fp32")


class Network:
    """Collectives of ranks that are threads; each is made when the last rank has come to it."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._begun: dict[Any, list[ThreadWork]] = {}
        self.broken: BaseException | None = None

    def post(self, key: Any, size: int, work: ThreadWork) -> ThreadWork:
        """Adds a rank's part of the collective `key`; the last of so many ranks makes it."""
        with self._lock:
            works = self._begun.setdefault(key, [])
            works.append(work)
            if len(works) == size:
                del self._begun[key]
                works.sort(key=lambda each: each.rank)
                for each in works:
                    assert torch.equal(each.snapshot, each.source), f"changed on its way: {key}"
                for each, made in zip(works, work.make(works), strict=True):
                    each.into.copy_(made)
                    each.is_made = True
                self._lock.notify_all()
        return work

    def wait(self, work: ThreadWork) -> None:
        """Until it is made. As torch's, RuntimeError for one that is not made in time."""
        with self._lock:
            if not self._lock.wait_for(lambda: work.is_made or self.broken, PATIENCE_S):
                self.broken = RuntimeError("a rank did not come")
            if not work.is_made:
                work.has_failed = True
                raise RuntimeError(f"another rank failed: {self.broken!r}")

    def fail(self, error: BaseException) -> None:
        """Ends all waits."""
        with self._lock:
            self.broken = self.broken or error
            self._lock.notify_all()


@dataclass(eq=False)
class ThreadWork:
    """One rank's part of a collective; `make` gives what each rank gets of all parts."""

    network: Network
    rank: int
    into: torch.Tensor
    source: torch.Tensor
    make: Callable[[list[ThreadWork]], Sequence[torch.Tensor]]
    lengths: Sequence[int] = ()  # of an all-to-all: bytes for each rank
    is_made: bool = False
    has_failed: bool = False

    def __post_init__(self) -> None:
        self.snapshot = self.source.clone()

    def wait(self, timeout: Any = None) -> None:
        self.network.wait(self)

    def is_completed(self) -> bool:
        return self.is_made or self.has_failed


class ThreadGroup:
    """What Communicator uses of a process group."""

    def __init__(self, network: Network, name: Any, rank: int, size: int) -> None:
        self._network, self._name, self._rank, self._size = network, name, rank, size
        self._numbers = itertools.count()

    def _post(
        self, into: torch.Tensor, source: torch.Tensor, make: Any, lengths: Sequence[int] = ()
    ) -> ThreadWork:
        work = ThreadWork(self._network, self._rank, into, source, make, lengths)
        return self._network.post((self._name, next(self._numbers)), self._size, work)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> ThreadWork:
        def largest(works: list[ThreadWork]) -> list[torch.Tensor]:
            return [torch.stack([each.snapshot for each in works]).amax(0)] * self._size

        return self._post(tensors[0], tensors[0], largest)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> ThreadWork:
        root = options.rootRank
        first = lambda works: [works[root].snapshot] * self._size  # noqa: E731
        return self._post(tensors[0], tensors[0], first)

    def _allgather_base(self, into: torch.Tensor, part: torch.Tensor) -> ThreadWork:
        def joined(works: list[ThreadWork]) -> list[torch.Tensor]:
            return [torch.cat([each.snapshot for each in works])] * self._size

        return self._post(into, part, joined)

    def alltoall_base(
        self, into: torch.Tensor, parts: torch.Tensor, _: list[int], sent: list[int]
    ) -> ThreadWork:
        def dealt(works: list[ThreadWork]) -> list[torch.Tensor]:
            table = [each.snapshot.split(list(each.lengths)) for each in works]
            return [
                torch.cat([row[peer] for row in table]).view(works[peer].into.shape)
                for peer in range(self._size)
            ]

        return self._post(into, parts, dealt, sent)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        raise RuntimeError("timed out")  # by which connections are broken off


class ThreadCommunicator(Communicator):
    """Communicator whose ranks are threads."""

    def __init__(self, network: Network, name: Any, ranks: list[int], me: int) -> None:
        self._network, self._name, self._me = network, name, me
        store = dist.HashStore()
        super().__init__(ranks, PATIENCE_S, FailedRanks(), WhileWaiting(), store, lambda: None)

    def _world_rank(self) -> int:
        return self._me

    def _connect(self, channels: Iterable[Channel], suffix: str, _: Any) -> dict[Channel, Any]:
        return {
            channel: ThreadGroup(self._network, (self._name, channel, suffix), self.rank, self.size)
            for channel in channels
        }


def communicator_of(network: Network, name: Any, ranks: list[int], me: int) -> Communicator | None:
    return ThreadCommunicator(network, name, ranks, me) if len(ranks) > 1 else None


@dataclass
class Rank:
    """One rank's buckets and the gradients they end in."""

    layout: Layout
    members: list[ManagedParam]
    grad_reducer: GradReducer
    grads: Grads
    homes: Homes
    pool: SlotPool
    held: contextlib.ExitStack  # inside no_sync(), as long as it is referred to
    zeroed: set[int] = field(default_factory=set)

    def arrive(self, index: int, value: float) -> None:
        """As GradHook does."""
        m = self.members[index]
        accumulate = m.has_grad
        m.param.grad = None
        self.grad_reducer.add(m, torch.full(m.param.shape, value), accumulate)

    def clear(self, to_none: bool) -> None:
        """As zero_grad() does."""
        for index, m in enumerate(self.members):
            if to_none:
                m.param.grad = None
            elif m.has_grad:
                self.grad_reducer.zero(m)
                self.zeroed.add(index)

    def average(self, force: bool) -> None:
        """As GradIntake does."""
        self.grad_reducer.reduce_all(force)
        for index in self.zeroed:
            if self.members[index].has_grad:
                self.grad_reducer.means.write_zeros(self.members[index])
        self.zeroed.clear()

    def gradient(self, index: int) -> torch.Tensor:
        """This rank's part."""
        m = self.members[index]
        return self.homes.shard(m.chunk)[m.in_shard(self.layout)[0]].clone()


def make_rank(
    network: Network,
    rank: int,
    shape: tuple[int, int],
    stage: int,
    numels: list[int],
    spare: int,
) -> Rank:
    replicas, shards = shape
    table = [[r * shards + s for s in range(shards)] for r in range(replicas)]
    mine = table[rank // shards]
    across = [row[rank % shards] for row in table]
    everyone = communicator_of(network, "everyone", list(range(replicas * shards)), rank)
    world = SimpleNamespace(
        everyone=everyone,
        shard=everyone
        if replicas == 1
        else communicator_of(network, ("shard", mine[0]), mine, rank),
        replicas=communicator_of(network, ("replicas", across[0]), across, rank),
        size=replicas * shards,
    )
    shard = Shard(rank % shards, shards, stage >= 3, replicas)
    specs = [ParamSpec(i, f"p{i}", n, True) for i, n in enumerate(numels)]
    layout = pack(specs, shard.slot_multiple, shard)
    ledger = Ledger(dict.fromkeys(Tier))
    slot_bytes = layout.slot_numel * 4
    homes = Homes(
        layout,
        FP32,
        StateKind.GRAD,
        [Tier.HOST] * len(layout.chunks),
        {},
        ledger,
        CpuBackend(),
    )
    nothing: Any = None
    memory: Any = SimpleNamespace(homes=dict.fromkeys(StateKind, homes), arenas=nothing)
    members = [
        ManagedParam(torch.nn.Parameter(torch.zeros(s.param.numel)), c, s, torch.float32)
        for c in layout.chunks
        for s in c.slices
    ]
    members.sort(key=lambda m: m.slice.param.index)
    chunks = chunk_states(layout.chunks, members)
    updates = ChunkUpdates(memory, chunks, nothing, OverlapUpdates.NONE)
    grads = Grads(layout, FP32, homes, lambda _: cast(SlotCache, None), updates)
    longest = max(c.slots for c in layout.chunks)

    def slots(count: int) -> SlotPool:
        return SlotPool(lambda n: HostArena(n, slot_bytes, ledger, Account.BUCKET), count)

    pool = slots(longest + spare)
    between = HostArena(longest, slot_bytes // shards, ledger, Account.BUCKET)
    grad_reducer = GradReducer(
        layout, members, world,
        ReduceBuffers(
            torch.float32, pool, slots(longest + spare), between if replicas > 1 else None
        ),
        grads,
        LossScale(),
    )  # fmt: skip
    held = contextlib.ExitStack()
    if stage == 1:  # as a chunk group that reduces at the end
        held.enter_context(grad_reducer.no_sync())
    return Rank(layout, members, grad_reducer, grads, homes, pool, held)


def on_ranks(count: int, function: Callable[[int], Any], network: Network) -> list[Any]:
    results: queue.Queue[Any] = queue.Queue()

    def run(rank: int) -> None:
        try:
            results.put((rank, function(rank), None))
        except BaseException as error:
            results.put((rank, None, error))
            network.fail(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(count)]
    for thread in threads:
        thread.start()
    found = [results.get(timeout=2 * PATIENCE_S) for _ in threads]
    for _, _, error in found:
        if error is not None:
            raise error
    return [result for _, result, _ in sorted(found, key=lambda f: f[0])]


# A rank's backward: arrivals, by index. A step: backwards as (held, arrivals per rank); whether
# gradients are cleared before one of them, on all ranks and after the same arrivals; whether they
# are after it; whether to None, or to zero.
PARAMS = 7


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    shape = draw(st.sampled_from([(1, 2), (1, 4), (2, 1), (2, 2)]))
    world = shape[0] * shape[1]
    multiple = Shard(0, shape[1], replicas=shape[0]).slot_multiple
    # From two parameters in a chunk to a chunk of two slots.
    sizes = [multiple // 4, multiple // 2, multiple, 2 * multiple - 3, 5]
    numels = draw(st.lists(st.sampled_from(sizes), min_size=PARAMS, max_size=PARAMS))
    arrivals = st.lists(st.integers(0, PARAMS - 1), max_size=10)
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        backwards = []
        for _ in range(draw(st.integers(1, 3))):
            if draw(st.booleans()):
                order = draw(st.permutations(range(PARAMS)))
                own = [list(order)] * world
            else:
                own = [draw(arrivals) for _ in range(world)]
            backwards.append((draw(st.integers(0, 3)) == 0, own))
        cleared = None
        if draw(st.booleans()):
            order = draw(st.permutations(range(PARAMS)))
            cleared = order[: draw(st.integers(0, PARAMS))]
        steps.append((cleared, backwards, draw(st.booleans()), draw(st.booleans())))
    return {
        "shape": shape,
        "stage": draw(st.sampled_from([1, 2])),
        "numels": numels,
        "spare": draw(st.integers(0, 2)),
        "steps": steps,
    }


def run_program(program: dict[str, Any]) -> None:
    shape, steps = program["shape"], program["steps"]
    world = shape[0] * shape[1]
    held_anywhere = program["stage"] == 1 or any(
        held for _, backwards, *_ in steps for held, _ in backwards
    )
    # Inside no_sync() buckets are kept whole, beyond the pool; that is another test's matter.
    spare = 2 * PARAMS + 2 if held_anywhere else program["spare"]
    network = Network()

    def body(rank: int) -> None:
        one = make_rank(network, rank, shape, program["stage"], program["numels"], spare)
        expected: list[float | None] = [None] * PARAMS
        stamp = 0

        def clear(to_none: bool) -> None:
            one.clear(to_none)
            expected[:] = [None if to_none or not m.has_grad else 0.0 for m in one.members]

        for number, (cleared, backwards, keep, to_none) in enumerate(steps):
            if cleared is not None:  # a backward that failed at the same place on all ranks
                for index in cleared:
                    one.arrive(index, 1000.0 + rank)
                clear(to_none)
            for held, arrivals in backwards:
                for index in range(PARAMS):
                    total = sum(
                        world * (2.0**r) * (stamp + 1) * a.count(index)
                        for r, a in enumerate(arrivals)
                    )
                    if any(index in a for a in arrivals):
                        expected[index] = (expected[index] or 0.0) + total / world
                if held:
                    with one.grad_reducer.no_sync():
                        for index in arrivals[rank]:
                            one.arrive(index, world * 2.0**rank * (stamp + 1))
                else:
                    for index in arrivals[rank]:
                        one.arrive(index, world * 2.0**rank * (stamp + 1))
                stamp += 1
            # Without force a rank that has older gradients and no new ones would not come.
            one.average(number % 2 == 0 or steps[number - 1][2] or not steps[number - 1][3])
            one.average(False)
            for index, value in enumerate(expected):
                assert one.members[index].has_grad == (value is not None), (number, index)
                if value is not None:
                    found = one.gradient(index)
                    assert torch.equal(found, torch.full_like(found, value)), (number, index)
                    fresh = sum_of_squares("fp32", found.data_ptr(), found.numel())
                    assert one.grads.sum_of_squares(one.members[index]) == fresh, (number, index)
            assert not any(one.pool._taken), "a bucket was not given back"
            if not keep:
                clear(to_none)

    on_ranks(world, body, network)


@given(programs())
@settings(suppress_health_check=list(HealthCheck))
def test_any_arrivals_become_the_mean(program: dict[str, Any]) -> None:
    run_program(program)


def test_what_came_in_no_sync_is_added_on_its_rank_however_few_buckets_there_are() -> None:
    """Rounded once on each rank, and once in the mean; not as the sum of two means."""
    numel = Shard(0, 2).slot_multiple

    def run(spare: int) -> list[torch.Tensor]:
        network = Network()

        def body(rank: int) -> torch.Tensor:
            made = make_rank(network, rank, (1, 2), 2, [numel, numel], spare)
            with made.grad_reducer.no_sync():
                made.arrive(0, 1.0)
            made.arrive(1, 1.0)  # of a chunk that has no bucket yet
            made.arrive(0, 2.0 ** (-24 + rank))
            made.grad_reducer.reduce_all(True)
            assert not any(made.pool._taken)
            return made.gradient(0)

        return on_ranks(2, body, network)

    few, many = run(0), run(4)
    assert all(map(torch.equal, few, many))


def test_what_others_sent_while_cleared_gradients_were_left_behind_counts() -> None:
    """Rank 0 failed before its backward, and all have cleared what the others' gave."""
    network, shape = Network(), (1, 2)
    numel = Shard(0, 2).slot_multiple // 2

    def body(rank: int) -> torch.Tensor:
        made = make_rank(network, rank, shape, 2, [numel, numel], 4)
        if rank == 1:
            made.arrive(1, 1000.0)  # of a chunk that waits for more
            made.clear(to_none=True)
        made.arrive(1, 2.0 + 2 * rank)
        made.average(True)
        return made.gradient(1)

    for found in on_ranks(2, body, network):
        assert torch.equal(found, torch.full_like(found, 3.0))


def test_what_one_rank_alone_cleared_after_a_mean_is_refused_on_all() -> None:
    """It would be added to the older gradient in one rank's shard, and replace it in the other."""
    network = Network()
    numel = Shard(0, 2).slot_multiple // 2

    def body(rank: int) -> str:
        made = make_rank(network, rank, (1, 2), 2, [numel, numel], 4)
        made.arrive(0, 1.0)
        made.average(True)
        if rank == 0:
            made.clear(to_none=True)
        made.arrive(0, 2.0)
        with pytest.raises(HeteroError) as refusal:
            made.average(True)
        return str(refusal.value)

    assert all("p0 was cleared on one rank" in found for found in on_ranks(2, body, network))


def test_what_one_rank_cleared_after_two_backwards_and_another_came_late_to_is_refused() -> None:
    """Rank 0 had no data, so its first gradient goes into a mean with rank 1's older ones.

    It stays refused until all have cleared what they have.
    """
    network = Network()
    numel = Shard(0, 2).slot_multiple // 2

    def body(rank: int) -> torch.Tensor:
        made = make_rank(network, rank, (1, 2), 2, [numel, numel], 4)
        if rank == 1:
            made.arrive(0, 1000.0)
            made.arrive(0, 1000.0)
        made.clear(to_none=True)
        with pytest.raises(HeteroError, match="p0 was cleared on one rank"):
            made.arrive(0, 2.0 + 2 * rank)
            made.average(True)
        with pytest.raises(HeteroError, match="p0 was cleared on one rank"):
            made.average(True)
        made.clear(to_none=True)
        made.arrive(0, 2.0 + 2 * rank)
        made.average(True)
        return made.gradient(0)

    for found in on_ranks(2, body, network):
        assert torch.equal(found, torch.full_like(found, 3.0))


def test_what_came_beside_an_assigned_gradient_is_not_replaced_by_it() -> None:
    """Assigned by a hook, while a backward that another rank ends the round of goes on."""
    network = Network()
    numel = Shard(0, 2).slot_multiple // 2

    def body(rank: int) -> str:
        made = make_rank(network, rank, (1, 2), 2, [numel, numel], 4)
        if rank == 1:
            made.arrive(1, 1.0)
        made.arrive(0, 1.0)
        assigned = torch.ones(numel)
        if rank == 0:
            made.members[1].param.grad = assigned
        made.arrive(0, 1.0)  # ends the round
        if rank == 0:
            assert made.members[1].param.grad is assigned
        with pytest.raises(HeteroError) as refusal:
            if rank == 0:
                made.arrive(1, 3.0)  # as it is taken in
            made.average(True)
        return str(refusal.value)

    assert all("p1 was cleared on one rank" in found for found in on_ranks(2, body, network))


@pytest.mark.parametrize("stage", [1, 2])
def test_what_one_rank_alone_had_and_made_zero_is_zero_on_all(stage: int) -> None:
    """Not what another rank's shard has from the step before."""
    network = Network()
    numel = Shard(0, 2).slot_multiple

    def body(rank: int) -> torch.Tensor:
        made = make_rank(network, rank, (1, 2), stage, [numel, numel], 4)
        made.arrive(0, 1000.0)
        made.average(True)
        made.clear(to_none=True)
        if rank == 0:
            made.arrive(0, 1.0)
            made.clear(to_none=False)
        made.average(True)
        assert made.members[0].has_grad
        return made.gradient(0)

    for found in on_ranks(2, body, network):
        assert torch.equal(found, torch.zeros_like(found))


def test_what_is_cleared_on_its_way_from_the_device_counts_as_zero() -> None:
    network, shape = Network(), (1, 2)
    numel = Shard(0, 2).slot_multiple // 2

    def run(rank: int) -> list[torch.Tensor]:
        made = make_rank(network, rank, shape, 2, [numel, numel], 0)
        ledger, backend = Ledger(dict.fromkeys(Tier)), EmulatedBackend(20 * numel)
        buffers = HostArena(BUFFERS, 4096, ledger, Account.BUFFER)
        grad_offload = made.grad_reducer.means._grad_offload = GradOffload(
            backend, ledger, 1 << 30, buffers
        )
        with made.grad_reducer.no_sync():
            made.arrive(0, 1.0)
            made.arrive(1, 2.0)
        if rank == 0:
            made.members[1].param.grad = None
        made.grad_reducer.reduce_all(True)
        found = [made.gradient(index) for index in (0, 1)]
        grad_offload.close()
        backend.close()
        return found

    found = on_ranks(2, run, network)
    assert torch.cat([one for one, _ in found]).eq(1).all()
    assert torch.cat([other for _, other in found]).eq(1).all()  # the mean of 0 and 2
