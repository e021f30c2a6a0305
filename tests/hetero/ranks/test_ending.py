"""Ranks that end: the others are told at once who and why, and none ends by another signal."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
from hetero.setup import initialize as setup
from tests.support.ranks.rank_training import Experts, Layers, inputs
from tests.support.ranks.scripts import INTERRUPTED, SOON_S, Ended, Place, Scripts
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


def succeed_after_a_failure(rank: int, place: Place) -> None:
    """An option is wrong on rank 1 alone, for a model from outside; then all goes on."""
    join()
    model = Experts(2)
    for options in (OPTIONS | ({"chunk_numel": -1} if rank == 1 else {}), OPTIONS):
        try:
            hetero.initialize(model, hetero.HybridAdam(model.parameters()), options)
        except (hetero.PeerError, ValueError) as error:
            kind = hetero.PeerError if rank == 0 else ValueError
            if isinstance(error, kind) and "chunk_numel" in str(error):
                place.say(f"refused-{rank}")
    model.inner(inputs(rank, 0)).square().mean().backward()


def succeed_after_one_rank_failed(rank: int, place: Place) -> None:
    """A model that was built in the context: rank 1 fails alone, when parts of the state are on
    their way, and twice, because nothing of an attempt may stay charged."""
    join()
    memory = {"placement_policy": "nvme", "nvme_path": str(place.folder), "chunk_numel": 8192}
    with hetero.ZeroInitContext(OPTIONS | memory, host_memory="450KiB"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    optimizer = hetero.HybridAdam(model.parameters())
    for attempt in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and attempt < 2:
                patch.setattr(setup, "_build", lambda *_: 1 / 0)
            fails = pytest.raises((hetero.PeerError, ZeroDivisionError))
            with fails if attempt < 2 else nullcontext():
                hetero.initialize(model, optimizer)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.engine.close()


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


def end_with_a_built_model(rank: int, place: Place, how: str) -> None:
    """A program of one process, whose model is refused or that does nothing more with it."""
    options = {"placement_policy": "nvme", "nvme_path": str(place.folder), "host_memory": 70000}
    with hetero.ZeroInitContext(options):
        model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
    optimizer = hetero.HybridAdam(model.parameters())
    if how == "refused":
        hetero.initialize(model, optimizer)


def end_without_close(rank: int, place: Place, status: int) -> None:
    """Rank 1 ends by SystemExit after a step, without close(); rank 0 goes on."""
    join()
    model, optimizer = make()
    for step in range(2):
        if rank == 1 and step == 1:
            raise SystemExit(status)
        model(inputs(rank, step, 128)).square().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def server() -> Iterator[Scripts]:
    with Scripts() as made:
        yield made


def last_line(ended: Ended) -> str:
    return ended.errors.strip().rsplit("\n", 1)[-1].split("]: ")[-1]  # without "[rank0]: "


def check_told(ended: Ended, *texts: str) -> None:
    """The rank ended by a PeerError with all the texts."""
    assert ended.status == 1, ended
    assert "PeerError: " in last_line(ended), ended.errors
    for text in texts:
        assert text in last_line(ended), ended.errors


# What Ctrl-C ends or the program catches, which then closes its engine alone: each place with each
# rank, and each place in which a rank can catch it with both ends.
INTERRUPTS = [
    ("construction", 0, False),
    ("construction", 1, False),
    ("forward", 0, True),
    ("forward", 1, False),
    ("backward", 0, False),
    ("backward", 1, True),
    ("step", 0, True),
    ("step", 1, False),
    ("close", 0, False),
    ("close", 1, False),
]
OTHER_INTERRUPTS = [
    pytest.param(where, rank, not catches, marks=pytest.mark.extra)
    for where, rank, catches in INTERRUPTS[2:8]
]


@pytest.mark.parametrize(("where", "rank", "catches"), INTERRUPTS + OTHER_INTERRUPTS)
def test_an_interrupt(server: Scripts, where: str, rank: int, catches: bool) -> None:
    """Of rank 0, which waits at the place, or of rank 1, which is waited for."""
    script = server.run(2, wait_at, where, catches)
    script.heard("waiting")
    script.heard("holding")
    script.interrupt(rank)
    # A gather goes on when who waits for it is interrupted, and a rank answers the other one until
    # that ends or closes, too; a mean does not go on.
    answers = where == "forward" and catches
    if rank == 0 and not answers:
        script.end(0)
    if rank == 0 or answers:
        script.open("go")
    other, ended = script.end(1 - rank), script.end(rank)
    if catches:
        assert ended == Ended(0, "")
        goes_on = rank == 1 or answers
        check_told(other, f"rank {rank}", "closed its engine" if goes_on else "KeyboardInterrupt")
        return
    assert ended.status == INTERRUPTED, ended
    assert last_line(ended) == "KeyboardInterrupt"
    if where == "close" and (rank == 1 or other.status == 0):
        assert other.status == 0, other  # it had nothing more to do with the rank
    elif where == "construction" and rank == 1:
        check_told(other, "rank 1 is gone")  # it never came to hetero
    else:
        check_told(other, f"rank {rank}", "KeyboardInterrupt")


class TestBeforeStart:
    @pytest.mark.parametrize(
        ("how", "status", "told"),
        [
            ("die in the block", 3, "rank 1 is gone"),
            ("directory", 1, "no such directory"),
            ("optimizer", 1, "not torch.optim.sgd.SGD"),
            pytest.param("block", 1, "the bad rank's own error", marks=pytest.mark.extra),
        ],
    )
    def test_others_are_told(self, server: Scripts, how: str, status: int, told: str) -> None:
        script = server.run(2, fail_before_start, how)
        assert script.end(1).status == status, script.errors(1)
        check_told(script.end(0), "rank 1", told)

    def test_all_can_try_again(self, server: Scripts) -> None:
        script = server.run(2, succeed_after_a_failure)
        for rank in range(2):
            script.heard(f"refused-{rank}")
            assert script.end(rank) == Ended(0, "")

    def test_all_can_try_again_after_one_has_failed(self, server: Scripts) -> None:
        script = server.run(2, succeed_after_one_rank_failed)
        for rank in range(2):
            assert script.end(rank) == Ended(0, "")


class TestWhileConnecting:
    """Ranks have met, and one ends before it is connected; their store is torchrun's kind."""

    @pytest.mark.parametrize(
        ("number", "how"),
        [
            (0, "killed"),
            (0, "killed with its address told"),
            (1, "killed"),  # the second chunk group's
        ],
    )
    def test_of_a_rank_that_is_killed(self, server: Scripts, number: int, how: str) -> None:
        script = server.run(2, end_while_connecting, number, how)
        assert script.end(1).status == -signal.SIGKILL
        check_told(script.end(0), "rank 1 is gone")

    def test_of_a_rank_that_fails(self, server: Scripts) -> None:
        script = server.run(2, end_while_connecting, 0, "fails")
        assert script.end(1).status == 1
        check_told(script.end(0), "rank 1", "the bad rank's own error")

    @pytest.mark.parametrize("rank", [0, 1])
    def test_of_a_rank_that_is_interrupted(self, server: Scripts, rank: int) -> None:
        script = server.run(2, end_while_connecting, 0, "interrupted")
        for each in range(2):
            script.heard(f"rank {each} connects 0")
        script.interrupt(rank)
        ended = script.end(rank)
        assert ended.status == INTERRUPTED, ended
        if rank == 1:
            check_told(script.end(0), "rank 1", "KeyboardInterrupt")


def test_a_rank_that_leaves_early_without_close(server: Scripts) -> None:
    script = server.run(2, end_without_close, 7, whole=True)
    check_told(script.end(0), "rank 1", "its program ended")
    assert script.end(1) == Ended(7, "")


@pytest.mark.parametrize("how", ["refused", pytest.param("left", marks=pytest.mark.extra)])
def test_a_program_without_an_engine_ends_without_a_word(server: Scripts, how: str) -> None:
    ended = server.run(1, end_with_a_built_model, how).end(0)
    assert ended.status == (how == "refused"), ended
    assert "Exception ignored" not in ended.errors
    assert "TypeError" not in ended.errors
    assert ("smallest that works" in last_line(ended)) == (how == "refused")


@pytest.mark.parametrize(
    "times", [pytest.param(1), pytest.param(30, marks=[pytest.mark.extra, pytest.mark.slow])]
)
def test_ranks_that_differ_end_by_exceptions(server: Scripts, times: int) -> None:
    """(Threads that waited in gloo while the interpreter ended ended the process by SIGABRT.)"""
    for _ in range(times):
        script = server.run(2, differ, whole=True)
        for rank in range(2):
            ended = script.end(rank)
            assert ended.status == 1, ended
            assert "Error: " in last_line(ended), ended.errors
            assert f"rank {1 - rank}" in last_line(ended), ended.errors


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("seed", range(20))
def test_interrupts_at_any_time(server: Scripts, seed: int) -> None:
    chance = random.Random(seed)
    script = server.run(2, train_for_ever)
    for rank in range(2):
        script.heard(f"training-{rank}")
    time.sleep(chance.random())
    hit = chance.choice([[0], [1], [0, 1]])
    started_s = time.monotonic()
    presses = 0
    while not all(map(script.has_ended, range(2))):
        passed_s = time.monotonic() - started_s
        assert passed_s < SOON_S, [script.errors(rank) for rank in range(2)]
        if passed_s >= 8 * presses:  # again, as people do: Python ignores one in a destructor
            presses += 1
            for rank in hit:
                if not script.has_ended(rank):
                    script.interrupt(rank)
        time.sleep(0.01)
    for rank in range(2):
        ended = script.end(rank)
        assert ended.status in ((INTERRUPTED, 1) if rank in hit else (1,)), ended
