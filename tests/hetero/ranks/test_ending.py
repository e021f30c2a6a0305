"""Ranks that end: the others are told at once who and why, and none ends by another signal."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.ranks import ending
from tests.support.ranks.scripts import SOON_S, Ended, Script, ScriptServer

PLACES = ["construction", "forward", "backward", "step", "close"]
INTERRUPTED = -signal.SIGINT  # by which Python ends a program that Ctrl-C ended


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    with ScriptServer() as made:
        yield made


def last_line(ended: Ended) -> str:
    return ended.errors.strip().rsplit("\n", 1)[-1].split("]: ")[-1]  # without "[rank0]: "


def check_told(ended: Ended, *texts: str) -> None:
    """The rank ended by a PeerError with all the texts."""
    assert ended.status == 1, ended
    assert "PeerError: " in last_line(ended), ended.errors
    for text in texts:
        assert text in last_line(ended), ended.errors


def at_place(server: ScriptServer, where: str, catches: bool = False) -> Script:
    """Rank 0 waits for rank 1, which holds."""
    script = server.run(2, ending.wait_at, where, catches)
    script.heard("waiting")
    script.heard("holding")
    return script


@pytest.mark.parametrize("where", PLACES)
class TestInterrupt:
    def test_of_the_rank_that_waits(self, server: ScriptServer, where: str) -> None:
        script = at_place(server, where)
        script.interrupt(0)
        ended = script.end(0)
        assert ended.status == INTERRUPTED, ended
        assert last_line(ended) == "KeyboardInterrupt"
        script.open("go")
        other = script.end(1)
        if where == "close" and other.status == 0:
            return  # it had nothing more to do with rank 0
        check_told(other, "rank 0", "KeyboardInterrupt")

    def test_of_the_rank_that_is_waited_for(self, server: ScriptServer, where: str) -> None:
        script = at_place(server, where)
        script.interrupt(1)
        ended, other = script.end(1), script.end(0)
        assert ended.status == INTERRUPTED, ended
        assert last_line(ended) == "KeyboardInterrupt"
        if where == "close":
            assert other.status == 0, other
        elif where == "construction":
            check_told(other, "rank 1 is gone")  # it never came to hetero
        else:
            check_told(other, "rank 1", "KeyboardInterrupt")


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
class TestInterruptThatIsCaught:
    """A rank that catches Ctrl-C and closes its engine alone."""

    def test_by_the_rank_that_waits(self, server: ScriptServer, where: str) -> None:
        script = at_place(server, where, catches=True)
        script.interrupt(0)
        if where == "forward":
            # A gather goes on when who waits for it is interrupted, and the rank answers the other
            # one until that ends; a mean does not go on.
            script.open("go")
            check_told(script.end(1), "rank 0", "closed its engine")
            assert script.end(0) == Ended(0, "")
            return
        assert script.end(0) == Ended(0, "")
        script.open("go")
        check_told(script.end(1), "rank 0", "KeyboardInterrupt")

    def test_by_the_rank_that_is_waited_for(self, server: ScriptServer, where: str) -> None:
        script = at_place(server, where, catches=True)
        script.interrupt(1)
        if where == "forward":
            script.open("go")  # it answers until the other rank closes too
        check_told(script.end(0), "rank 1", "closed its engine")
        assert script.end(1) == Ended(0, "")


class TestBeforeStart:
    @pytest.mark.parametrize(
        ("how", "status", "told"),
        [
            ("die in the block", 3, "rank 1 is gone"),
            ("directory", 1, "no such directory"),
            ("block", 1, "the bad rank's own error"),
            ("optimizer", 1, "not SGD"),
        ],
    )
    def test_others_are_told(self, server: ScriptServer, how: str, status: int, told: str) -> None:
        script = server.run(2, ending.fail_before_start, how)
        assert script.end(1).status == status, script.errors(1)
        check_told(script.end(0), "rank 1", told)

    def test_of_an_option_that_is_wrong_on_one_rank(self, server: ScriptServer) -> None:
        script = server.run(2, ending.fail_before_start_outside)
        assert "ValueError" in last_line(script.end(1))
        check_told(script.end(0), "rank 1", "chunk_numel")

    def test_all_can_try_again(self, server: ScriptServer) -> None:
        script = server.run(2, ending.succeed_after_a_failure)
        for rank in range(2):
            script.heard(f"refused-{rank}")
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
    def test_of_a_rank_that_is_killed(self, server: ScriptServer, number: int, how: str) -> None:
        script = server.run(2, ending.end_while_connecting, number, how)
        assert script.end(1).status == -signal.SIGKILL
        check_told(script.end(0), "rank 1 is gone")

    def test_of_a_rank_that_fails(self, server: ScriptServer) -> None:
        script = server.run(2, ending.end_while_connecting, 0, "fails")
        assert script.end(1).status == 1
        check_told(script.end(0), "rank 1", "the bad rank's own error")

    @pytest.mark.parametrize("rank", [0, 1])
    def test_of_a_rank_that_is_interrupted(self, server: ScriptServer, rank: int) -> None:
        script = server.run(2, ending.end_while_connecting, 0, "interrupted")
        for each in range(2):
            script.heard(f"rank {each} connects 0")
        script.interrupt(rank)
        ended = script.end(rank)
        assert ended.status == INTERRUPTED, ended
        if rank == 1:
            check_told(script.end(0), "rank 1", "KeyboardInterrupt")


def test_a_rank_that_leaves_early_without_close(server: ScriptServer) -> None:
    script = server.run(2, ending.end_without_close, 7)
    check_told(script.end(0), "rank 1", "its program ended")
    assert script.end(1) == Ended(7, "")


@pytest.mark.parametrize(
    "times", [pytest.param(1), pytest.param(30, marks=[pytest.mark.extra, pytest.mark.slow])]
)
def test_ranks_that_differ_end_by_exceptions(server: ScriptServer, times: int) -> None:
    """(Threads that waited in gloo while the interpreter ended ended the process by SIGABRT.)"""
    for _ in range(times):
        script = server.run(2, ending.differ)
        for rank in range(2):
            ended = script.end(rank)
            assert ended.status == 1, ended
            assert "Error: " in last_line(ended), ended.errors
            assert f"rank {1 - rank}" in last_line(ended), ended.errors


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("seed", range(20))
def test_interrupts_at_any_time(server: ScriptServer, seed: int) -> None:
    chance = random.Random(seed)
    script = server.run(2, ending.train_for_ever)
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
