"""Programs of ranks that end at a chosen place. Each function is one rank's whole program."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hetero
from hetero.ranks import peers
from hetero.ranks.communicator import Communicator
from hetero.ranks.peers import Peers
from hetero.ranks.shard_server import ShardServer
from hetero.ranks.start.meeting import Meeting, PolledStore
from hetero.ranks.waiting import wait_for_job
from hetero.runtime import step as steps
from tests.support.ranks.rank_training import Experts, Layers, inputs
from tests.support.ranks.scripts import Place
from tests.support.waiting import until

OPTIONS = {
    "dtype": "fp32",
    "placement_policy": "cpu",
    "rank_timeout_s": 120.0,
    "chunk_numel": 16384,
}

# By place: what the rank that waits there waits for.
WAITS = {
    "forward": "gathering",
    "backward": "gradient",
    "step": "optimizer.step()",
}


def join(keeper: Place | None = None) -> None:
    """As torchrun's ranks do, over the store of this run.

    That is a file, or with `keeper` a TCPStore as torchrun's, which rank 0 keeps and the others
    find there.
    """
    torch.set_num_threads(1)
    if keeper is not None:
        dist.init_process_group(
            "gloo",
            store=_tcp_store(keeper),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        return
    dist.init_process_group(
        "gloo",
        init_method=os.environ["HETERO_TEST_STORE"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def _tcp_store(place: Place) -> Any:
    path = place.folder / "port"
    if os.environ["RANK"] == "0":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
        return store
    until(path.exists)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), wait_for_workers=False)


def make(**options: Any) -> tuple[torch.nn.Module, hetero.HybridAdam]:
    torch.manual_seed(0)
    with hetero.ZeroInitContext(OPTIONS | options):
        model = Layers(4)
    return hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-2))


def wait_at(rank: int, place: Place, where: str, catches: bool) -> None:
    """Rank 0 waits at `where` for rank 1, which holds before it until the gate "go" opens.

    Rank 0 says "waiting" there, and rank 1 "holding". With `catches` a rank that Ctrl-C interrupts
    catches it and closes its engine alone.
    """
    join()
    dist.barrier()
    if rank == 0:
        _say_when_waiting(place, where)

    def here(now: str) -> None:
        if rank == 1 and now == where:
            place.say("holding")
            place.hold("go")

    here("construction")
    model, optimizer = make()
    interrupted = False
    try:
        _train(rank, place, model, optimizer, here, where)
    except KeyboardInterrupt:
        if not catches:
            raise
        interrupted = True
    if interrupted:
        optimizer.engine.close()


def _train(
    rank: int,
    place: Place,
    model: torch.nn.Module,
    optimizer: hetero.HybridAdam,
    here: Callable[[str], None],
    where: str,
) -> None:
    if rank == 1 and where == "forward":
        _answer_only_after(place, "go")
    meet = steps._meet_with_same

    def meet_later(*args: Any) -> None:
        here("step")
        meet(*args)

    pytest.MonkeyPatch().setattr(steps, "_meet_with_same", meet_later)
    here("forward")
    for step in range(2):
        loss = model(inputs(rank, step, 128)).square().mean()
        here("backward")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    here("close")
    optimizer.engine.close()


def _say_when_waiting(place: Place, where: str) -> None:
    """Says "waiting" when this rank comes to wait at `where`."""
    patch = pytest.MonkeyPatch()
    wait, finish = Peers.wait, Communicator.finish
    is_needed, meet = ShardServer._is_needed, Meeting.wait_for_all

    def wait_and_say(self: Peers, wait_for: Any, peer: int, what: str) -> None:
        def say_and_wait(limit: Any) -> None:  # when this rank is inside of the wait
            if WAITS.get(where, "(elsewhere)") in what:
                place.say("waiting")
            wait_for(limit)

        wait(self, say_and_wait, peer, what)

    def finish_and_say(self: Communicator, work: Any, operation: Any, what: str) -> None:
        # (A mean is finished in another thread, perhaps before this rank's program waits for it.)
        if where != "backward" and WAITS.get(where, "(elsewhere)") in what:
            place.say("waiting")
        finish(self, work, operation, what)

    def wait_for_job_and_say(job: Any, look: Callable[[], None], *rest: Any) -> None:
        def say_and_look() -> None:
            place.say("waiting")
            look()

        wait_for_job(job, say_and_look, *rest)

    def close_and_say(self: ShardServer) -> bool:
        place.say("waiting")
        return is_needed(self)

    def meet_and_say(*args: Any) -> None:
        place.say("waiting")
        meet(*args)

    if where == "close":
        patch.setattr(ShardServer, "_is_needed", close_and_say)
    elif where == "construction":
        patch.setattr(Meeting, "wait_for_all", meet_and_say)
    else:
        patch.setattr(Peers, "wait", wait_and_say)
        patch.setattr(Communicator, "finish", finish_and_say)
        if where == "backward":
            patch.setattr(peers, "wait_for_job", wait_for_job_and_say)


def _answer_only_after(place: Place, word: str) -> None:
    """This rank's shard servers answer nothing before the gate `word` opens, or they close."""
    answer = ShardServer._answer

    def answer_later(self: ShardServer, peer: int, header: torch.Tensor) -> None:
        while not (place.folder / word).exists() and not self._closing:
            threading.Event().wait(0.005)
        answer(self, peer, header)

    pytest.MonkeyPatch().setattr(ShardServer, "_answer", answer_later)


def fail_before_start(rank: int, place: Place, how: str) -> None:
    """Rank 1 fails before it has an engine."""
    join()
    dist.barrier()
    torch.manual_seed(0)
    bad = rank == 1
    if bad and how == "die":
        os._exit(3)
    options = dict(OPTIONS)
    if how == "directory":
        options |= {"placement_policy": "nvme", "host_memory": "400KiB"}
        options["nvme_path"] = str(place.folder) if rank == 0 else "/proc/no such directory"
    with hetero.ZeroInitContext(options):
        model = Layers(4)
        if bad and how == "die in the block":
            os._exit(3)
        if bad and how == "block":
            raise ValueError("the bad rank's own error")
    optimizer: Any = hetero.HybridAdam(model.parameters())
    if bad and how == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hetero.initialize(model, optimizer)


def end_while_connecting(rank: int, place: Place, number: int, how: str) -> None:
    """Rank 1 ends while it connects its communicator `number`, after rank 0 began to connect its.

    `how`: it is killed, before or after it tells rank 0 its address, fails, or waits for Ctrl-C.
    """
    join(place)
    dist.barrier()
    patch, connect = pytest.MonkeyPatch(), Peers._connect
    numbers = itertools.count()

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def end() -> None:
        place.hold(f"rank 0 connects {number}")
        if how == "killed":
            kill()
        elif how == "killed with its address told":
            patch.setattr(PolledStore, "wait", kill)
        elif how == "fails":
            raise ValueError("the bad rank's own error")
        else:
            place.hold("never")

    def connect_or_end(self: Peers, *args: Any) -> Any:
        now = next(numbers)
        place.say(f"rank {rank} connects {now}")
        if rank == 1 and now == number:
            end()
        return connect(self, *args)

    patch.setattr(Peers, "_connect", connect_or_end)
    make(dtype="bf16", keep_fp32=["layers.0.*"])  # two chunk groups, with connections of their own


def fail_before_start_outside(rank: int, place: Place) -> None:
    """As fail_before_start(), for a model from outside and an option that is wrong on rank 1."""
    join()
    model = Experts(2)
    options = OPTIONS | ({"chunk_numel": -1} if rank == 1 else {})
    hetero.initialize(model, hetero.HybridAdam(model.parameters()), options)


def succeed_after_a_failure(rank: int, place: Place) -> None:
    """A rank fails before it met the others, then a construction fails on all; then all goes on."""
    join()
    model = Experts(2)
    for options in (OPTIONS | ({"chunk_numel": -1} if rank == 1 else {}), OPTIONS):
        try:
            hetero.initialize(model, hetero.HybridAdam(model.parameters()), options)
        except (hetero.PeerError, ValueError):
            place.say(f"refused-{rank}")
    model.inner(inputs(rank, 0)).square().mean().backward()


def differ(rank: int, place: Place) -> None:
    """Rank 1 does not clip: each is told what the other does, and nothing catches it."""
    join()
    model, optimizer = make()
    for step in range(2):
        model(inputs(rank, step, 128)).square().mean().backward()
        if rank == 0:
            hetero.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def train_for_ever(rank: int, place: Place) -> None:
    """Until something ends it."""
    join()
    model, optimizer = make()
    step = 0
    while True:
        model(inputs(rank, step, 128)).square().mean().backward()
        hetero.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        place.say(f"training-{rank}")


def end_without_close(rank: int, place: Place, status: int) -> None:
    """Rank 1 ends by SystemExit after a step, without close(); rank 0 goes on."""
    join()
    model, optimizer = make()
    for step in range(2):
        if rank == 1 and step == 1:
            raise SystemExit(status)
        model(inputs(rank, step, 128)).square().mean().backward()
        optimizer.step()
