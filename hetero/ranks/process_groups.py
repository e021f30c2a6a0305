"""The groups of ranks that train one model: which rank shares state with which."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hetero.ranks.communicator import Communicator
from hetero.ranks.start.machine import choose_interface, machine_id
from hetero.ranks.start.meeting import absent, meet
from hetero.ranks.waiting import FailedRanks, WhileWaiting, name_error
from offload.errors import HeteroError, PeerError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_Result = TypeVar("_Result")


class _Members(NamedTuple):
    """Ranks in the world, this one always among them; ProcessGroups has a communicator of each."""

    shard: list[int]
    replicas: list[int]
    everyone: list[int]


class ProcessGroups:
    """The ranks that train one model together, seen from this one.

    Attributes:
        shard: the ranks that each chunk is divided over, this one among them.
        replicas: the ranks that have the same shard as this one. With hybrid sharding the ranks of
            a node shard and nodes are replicas; else there is one replica.
        everyone: all ranks.
        local_ranks: how many of them run on this machine.
        name: this rank's name as users know it: "rank 3" of the world.
        failures: the ranks that are known to have failed.
        while_waiting: what this rank does in waits for others.
        is_closed: there are no connections, until reconnect().

    A group of this rank alone is None.
    """

    def __init__(
        self, timeout_s: float, process_group: Any = None, mesh: DeviceMesh | None = None
    ) -> None:
        """Connects the ranks. All of them must call this. Without torch.distributed it is one rank.

        Args:
            timeout_s: limit of each wait for another rank.
            process_group: the ranks; None: all ranks, or those of `mesh`.
            mesh: one dimension shards; two replicate and shard.

        Raises ValueError if both are given, this rank is not one of them, the mesh has more
        dimensions, or the network interface is not known; PeerError if a rank did not come in time.
        """
        if process_group is not None and mesh is not None:
            raise ValueError("give process_group or mesh, not both")
        shard, replicas = _groups(process_group, mesh)
        self.name = f"rank {_my_rank()}"  # (which torch forgets with its process group)
        place = shard.index(_my_rank())
        everyone = sorted(rank for one in replicas for rank in one)
        self._members = _Members(shard, [one[place] for one in replicas], everyone)
        self._timeout_s = timeout_s
        self.shard: Communicator | None = None
        self.replicas: Communicator | None = None
        self.everyone: Communicator | None = None
        self._met_as = "hetero"
        self.reconnect()
        self.local_ranks = 1
        if self.everyone is not None:
            mine = machine_id()
            self.local_ranks = self.everyone.all_gather_bytes(mine, "hetero's start").count(mine)

    @property
    def ranks(self) -> int:
        """The number of ranks that a chunk is divided over."""
        return self.shard.size if self.shard is not None else 1

    @property
    def rank(self) -> int:
        """This rank's number among those that a chunk is divided over."""
        return self.shard.rank if self.shard is not None else 0

    @property
    def size(self) -> int:
        """The number of all ranks, replicas included; gradients are averaged over them."""
        return self.everyone.size if self.everyone is not None else 1

    @property
    def is_on_several_machines(self) -> bool:
        """Whether not all ranks run on this machine."""
        return self.local_ranks < self.size

    def duplicate(self) -> ProcessGroups:
        """The same ranks over connections of their own, so that messages do not mix.

        All ranks must call it. Raises PeerError.
        """
        # Over the old connections, where it is seen if a rank is gone.
        self.meet("making further connections")
        made = copy.copy(self)
        made._connect(self._met_as)
        return made

    def reconnect(self) -> None:
        """Connects the ranks anew, as if none had failed. All ranks must call it. Raises PeerError.

        Some of the connections before may have been broken off, by some of the ranks alone.
        """
        self.failures = FailedRanks()
        self.while_waiting = WhileWaiting()
        self._met_as = self._connect(self._met_as)
        self.is_closed = False

    def _connect(self, before: str) -> str:
        """Gives this object communicators of its own. All ranks must call it.

        `before` is as meet() takes it. Returns the name of the ranks' meeting; there is none of one
        rank.
        """
        members = self._members
        if len(members.everyone) == 1:
            return ""
        with meet(members.everyone, self._timeout_s, before) as meeting:
            choose_interface()  # the default process group may be NCCL's

            def connect(name: str, ranks: list[int]) -> Communicator | None:
                if len(ranks) == 1:
                    return None
                name = f"{name}/{'-'.join(map(str, ranks))}"
                store = dist.distributed_c10d.PrefixStore(name, meeting.store)
                return Communicator(
                    ranks, self._timeout_s, self.failures, self.while_waiting, store, meeting.look
                )

            self.shard = connect("shard", members.shard)
            self.replicas = connect("replicas", members.replicas)
            is_all = len(members.shard) == len(members.everyone)
            self.everyone = self.shard if is_all else connect("everyone", members.everyone)
        return meeting.name

    def groups(self) -> list[Communicator]:
        """The communicators, each once."""
        found = {id(g): g for g in (self.shard, self.replicas, self.everyone) if g is not None}
        return list(found.values())

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Every rank's `tensor`, stacked; shape and dtype must be the same. Raises PeerError."""
        if self.everyone is None:
            return tensor.unsqueeze(0)
        return self.everyone.all_gather(tensor, what)

    def meet(self, what: str) -> None:
        """Until all ranks have come; `what` says what they are about to do. Raises PeerError."""
        if self.everyone is not None:
            self.everyone.announce(what, 0)

    def agree(self, value: int, choose: Callable[[Iterable[int]], int], what: str) -> int:
        """Applies `choose` to all ranks' values; `what` names it in errors. Raises PeerError."""
        return choose(self.all_gather(torch.tensor([value], device="cpu"), what).view(-1).tolist())

    def all_or_none(
        self,
        failure: BaseException | None,
        what: str,
        same_class: tuple[type[HeteroError], ...] = (),
    ) -> None:
        """Returns if no rank met a failure, else raises on every rank. All ranks must call it.

        Args:
            failure: what this rank met when it tried, or None.
            what: what all ranks tried, with a verb first: "move homes".
            same_class: failures of these classes are raised as the same class on other ranks.

        Raises:
            BaseException: `failure`, if there is one; unless it is a PeerError, which this rank met
                because another one failed.
            HeteroError: on the other ranks, with the first failure and its rank.
        """
        if self.everyone is None:
            if failure is not None:
                raise failure
            return
        classes = (*same_class, HeteroError)
        mine = ""
        if failure is not None:
            number = next((i for i, c in enumerate(same_class) if isinstance(failure, c)), -1)
            is_effect = isinstance(failure, PeerError)
            where = f" on {socket.gethostname()}" if self.is_on_several_machines else ""
            mine = f"{is_effect:d}\0{number}\0{where}\0{type(failure).__name__}: {failure}"
        flag = torch.tensor([bool(mine)], dtype=torch.uint8, device="cpu")
        if not self.everyone.any(flag, f"the agreement to {what}"):
            return
        found = self.everyone.all_gather_bytes(mine.encode(), f"the agreement to {what}")
        failures = []
        for peer, theirs in enumerate(found):
            if theirs:
                effect, number_text, where, text = theirs.decode().split("\0", 3)
                failures.append((effect == "1", peer, int(number_text), where, text))
        # A PeerError is the effect of another rank's failure: causes first, in order of ranks.
        only_effects, peer, number, where, text = min(failures)
        if failure is not None and (only_effects or not isinstance(failure, PeerError)):
            raise failure
        name = f"{self.everyone.name(peer)}{where}"
        raise classes[number](f"{name} could not {what}, so no rank did: {text}")

    def together(
        self,
        what: str,
        action: Callable[[], _Result],
        same_class: tuple[type[HeteroError], ...] = (),
    ) -> _Result:
        """Calls `action`, and returns its result once no rank's has failed. All ranks must call it.

        Raises as all_or_none(), of whose other arguments these have the names.
        """
        failure: Exception | None = None
        try:
            found = action()
        except Exception as error:
            failure = error
        self.all_or_none(failure, what, same_class)
        return found

    def require_equal(
        self,
        facts: dict[str, str],
        what: str,
        remedy: str = "all ranks must build the same model with the same options",
    ) -> None:
        """Compares `facts`, values by name in some order, over the ranks. All ranks must call it.

        Raises HeteroError with the first difference; `what` says in it what they are, and `remedy`
        what to do.
        """
        if self.everyone is None:
            return
        content = "\0".join(f"{key}\1{value}" for key, value in facts.items()).encode()
        digest = torch.frombuffer(bytearray(blake2b(content).digest()), dtype=torch.int64)
        if self.everyone.are_same(digest, what):
            return
        for peer, other in enumerate(self.everyone.all_gather_bytes(content, what)):
            if other != content:
                theirs = dict(line.split("\1", 1) for line in other.decode().split("\0"))
                for key in [*facts, *theirs]:
                    if facts.get(key) != theirs.get(key):
                        raise HeteroError(
                            f"{what} differ between ranks: {key} is {facts.get(key)} on "
                            f"{self.name} and {theirs.get(key)} on {self.everyone.name(peer)}; "
                            f"{remedy}"
                        )
                number, (here, there) = next(
                    (number, pair)
                    for number, pair in enumerate(zip(facts, theirs, strict=True))
                    if pair[0] != pair[1]
                )
                raise HeteroError(
                    f"{what} differ between ranks: number {number} is {here} on {self.name} and "
                    f"{there} on {self.everyone.name(peer)}; all ranks must have them in one order"
                )

    @contextmanager
    def telling_failures(self, what: str) -> Iterator[None]:
        """What is raised inside the block, ranks that wait for this one in `what` are told."""
        try:
            yield
        except BaseException as error:
            self.tell_failure(what, error)
            raise

    def tell_failure(self, what: str, error: BaseException) -> None:
        """Tells ranks that wait for this one in the call `what` that it failed there, and how."""
        self.failures.tell(f"{self.name} failed in {what}: {name_error(error)}")

    def leave(self, error: BaseException | None) -> None:
        """Tells the other ranks that this one makes no more common operations.

        If `error` ends this rank, or another one has failed, this breaks off all connections, its
        duplicates' too, so that no rank waits for another any more.
        """
        first = self.failures.first
        if error is not None:
            self.failures.end(f"{self.name} ended by {name_error(error)}")
        elif self.failures.own_end is None and first is None:
            why = f"{self.name} closed its engine, or its program ended"
            self.failures.tell(why, answers=True)
        elif first is not None:
            self.failures.end(f"{self.name} closed its engine, after this: {first[1]}")

    def close(self) -> None:
        """Drops all connections."""
        self.is_closed = True
        for group in self.groups():
            group.close()


def error_that_ends_this_rank() -> BaseException | None:
    """The exception because of which this rank closes its engine, or None.

    That is the exception that is being handled, as in `finally: engine.close()`, or the uncaught
    one by which a script ends (Python stores it before it runs what is registered for its exit).
    In an interactive session the stored one is the last that was printed, however long ago and
    whatever its cause, and says nothing about this engine.
    """
    handled = sys.exc_info()[1]
    if handled is not None or hasattr(sys, "ps1"):
        return handled
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def tell_absence(process_group: Any, mesh: DeviceMesh | None, error: BaseException) -> None:
    """Tells the ranks that are about to make ProcessGroups that this one cannot, and why.

    They are those that the arguments, which are ProcessGroups', would have connected. All ranks can
    try again afterwards.
    """
    with contextlib.suppress(ValueError):  # nobody knows which ranks these are
        _, replicas = _groups(process_group, mesh)
        absent(sorted(rank for one in replicas for rank in one), error)


def _my_rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def is_distributed() -> bool:
    """Whether this process has torch.distributed's default process group."""
    return dist.is_available() and dist.is_initialized()


def _groups(process_group: Any, mesh: DeviceMesh | None) -> tuple[list[int], list[list[int]]]:
    """The ranks that share each chunk with this one, and those lists of all replicas."""
    if not is_distributed():
        if process_group is not None or mesh is not None:
            raise ValueError("a process group or mesh needs torch.distributed to be initialized")
        return [0], [[0]]
    if mesh is None:
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        _require_member(ranks)
        return ranks, [ranks]
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions; one (sharded) or two (replicated, sharded) work"
        )
    table = mesh.mesh.tolist() if mesh.ndim == 2 else [mesh.mesh.tolist()]
    _require_member([rank for one in table for rank in one])
    mine = next(one for one in table if _my_rank() in one)
    return mine, table


def _require_member(ranks: list[int]) -> None:
    if _my_rank() not in ranks:
        raise ValueError(f"rank {_my_rank()} is not one of the group's ranks {ranks}")


def init_default_group(timeout: timedelta | None = None, backend: str = "gloo") -> None:
    """torch.distributed.init_process_group(backend, timeout=timeout), of torchrun's ranks.

    All must call it. After torchrun has restarted them (--max-restarts), too: its agent keeps its
    store, and torch (2.13) looks for addresses of the new ranks under the same keys as those of the
    old ones, which it finds, and then fails or waits for ever.

    Raises RuntimeError if ranks are missing, ValueError as choose_interface() does.
    """
    # Loaded after the group is there, it would keep the group's threads past its end: they would be
    # in its functions' default arguments.
    import torch.distributed.nn.functional  # noqa: F401

    choose_interface()
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, **more)
        return
    store, rank, size = next(dist.rendezvous("env://", **more))  # type: ignore[attr-defined]
    store = dist.distributed_c10d.PrefixStore(f"restart {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **more)
