"""Where ranks meet before they are connected: in torch.distributed's store.

A rank that waits there learns within a moment that another one has failed before it came, and why
(absent()). That the process of another rank has ended, it sees by the connection that the default
process group has to that process, if this group is gloo's: on it each rank that comes sends one
byte, so that receiving that fails if it cannot come any more. NCCL has no such connection; there
only whoever started the process sees its end (torchrun does, and ends the others).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hetero.ranks.failed_ranks import name_error
from hetero.ranks.waiting import join_all, start_thread
from offload.errors import PeerError

_LOOK_S = 0.02
_FIRST_TAG = 1 << 30  # on the default process group, where other code has small ones
_FOREVER = timedelta(days=365)
_FAILED = "failed"  # the key of the text of the first rank that cannot come
_met: dict[tuple[int, ...], int] = {}  # meetings of the same ranks; the numbers agree on all ranks


def meet(ranks: Sequence[int], timeout_s: float) -> Any:
    """Returns when all `ranks` of the world, this one among them, have called this.

    Returns torch.distributed's store, with a prefix of this meeting's own. Raises PeerError if a
    rank did not come within `timeout_s`, or cannot come any more; it names the rank and the cause.
    """
    store, number = _next_meeting(ranks)
    try:
        _meet(ranks, timeout_s, store, _Arrivals(ranks, number))
    except RuntimeError as error:
        raise PeerError(
            f"torch.distributed's store cannot be reached from rank {dist.get_rank()}, because the "
            f"process that keeps it (torchrun, or else rank 0) is gone: look at its own error"
        ) from error
    except BaseException as error:
        tell_failure(store, error)
        raise
    return store


def look(store: Any) -> None:
    """Raises PeerError if a rank failed before it was connected with all others of the meeting."""
    if store.check([_FAILED]):
        raise PeerError(store.get(_FAILED).decode())


def tell_failure(store: Any, error: BaseException) -> None:
    """Tells the others of the meeting that this rank fails before it is connected with them."""
    with contextlib.suppress(RuntimeError):  # the process that keeps the store is gone
        text = f"rank {dist.get_rank()} failed before it met the others: {name_error(error)}"
        store.compare_set(_FAILED, "", text)


def absent(ranks: Sequence[int], error: BaseException) -> None:
    """Instead of meet(): the other ranks' next one raises PeerError, with the text of `error`."""
    if len(ranks) > 1:
        tell_failure(_next_meeting(ranks)[0], error)


def _next_meeting(ranks: Sequence[int]) -> tuple[Any, int]:
    number = _met.get(tuple(ranks), 0)
    _met[tuple(ranks)] = number + 1
    name = f"hetero/{'-'.join(map(str, ranks))}/{number}"
    store = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore(name, store), number


def _meet(ranks: Sequence[int], timeout_s: float, store: Any, arrivals: _Arrivals) -> None:
    store.set(f"here/{dist.get_rank()}", "")
    started = time.monotonic()
    here = {rank: f"here/{rank}" for rank in ranks}
    while True:
        all_here = store.check(list(here.values()))
        if all_here:
            arrivals.wait()
        gone = list(arrivals.gone)  # before look(): what it told before it ended is in the store
        look(store)
        if gone:
            raise PeerError(
                f"rank {min(gone)} is gone (its process ended before hetero's start): look at its "
                f"own error"
            )
        if all_here:
            return
        if time.monotonic() - started > timeout_s:
            missing = next(rank for rank, key in here.items() if not store.check([key]))
            raise PeerError(
                f"rank {missing} did not take part in hetero's start within {timeout_s:.0f} s; it "
                f"hangs, is much slower, or runs other code than rank {dist.get_rank()}. All ranks "
                f"must make the same calls; raise rank_timeout_s (now {timeout_s:g}) if it is only "
                f"slow"
            )
        time.sleep(_LOOK_S)


class _Arrivals:
    """One byte from each of the other ranks, over the connections of the default process group.

    Attributes:
        gone: the ranks whose processes have ended before they sent theirs.
    """

    def __init__(self, ranks: Sequence[int], number: int) -> None:
        """Sends this rank's byte to each other one, and receives theirs, in a thread each."""
        self.gone: list[int] = []
        self._group, self._tag = _default_gloo(), _FIRST_TAG + number
        self._byte = torch.zeros(1, dtype=torch.uint8)
        self._threads = []
        if self._group is None:
            return
        for rank in ranks:
            if rank != dist.get_rank():
                exchange, end = partial(self._exchange, rank), partial(self._give_up, rank)
                self._threads.append(start_thread(f"meeting-{rank}", exchange, end))

    def _exchange(self, rank: int) -> None:
        sent = None
        try:
            sent = self._group.send([self._byte], rank, self._tag)
            self._receive(rank)
        except RuntimeError:
            self.gone.append(rank)
        if sent is not None:  # gloo leaves out what it has not sent when the handle goes
            with contextlib.suppress(RuntimeError):
                sent.wait(_FOREVER)

    def _receive(self, rank: int) -> None:
        self._group.recv([torch.zeros_like(self._byte)], rank, self._tag).wait(_FOREVER)

    def _give_up(self, rank: int) -> None:
        """Ends the threads when the program ends, and with them the default process group.

        As Communicator.break_off() does.
        """
        with contextlib.suppress(RuntimeError):
            byte = torch.zeros_like(self._byte)
            self._group.recv([byte], rank, _FIRST_TAG - 1).wait(timedelta(milliseconds=1))

    def wait(self) -> None:
        """Until all bytes have arrived, or cannot; after all ranks have come."""
        join_all(self._threads)


def _default_gloo() -> Any:
    """gloo's part of the default process group, whose connections last; None if it has none."""
    group = dist.distributed_c10d._get_default_group()
    with contextlib.suppress(RuntimeError):
        backend = group._get_backend(torch.device("cpu"))
        if isinstance(backend, dist.ProcessGroupGloo):
            return backend
    return None
