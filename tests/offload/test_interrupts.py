"""offload/interrupts: signals wait for the end of what is uninterrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from offload.errors import HeteroError
from offload.interrupts import Damage, Uninterrupted, deliver_signals, uninterrupted


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):  # until Python has looked for signals
        pass


@pytest.fixture(autouse=True)
def handler_is_the_same(ctrl_c: None) -> Iterator[None]:
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_is_delivered_at_the_end_of_the_outermost_function() -> None:
    done = []

    @uninterrupted
    def inner() -> None:
        interrupt()
        done.append("inner")

    @uninterrupted
    def outer() -> None:
        inner()
        done.append("outer")

    damage = Damage()
    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["inner", "outer"]
    outer_only = uninterrupted(lambda: done.append("again"))
    outer_only()  # nothing is left to be delivered
    damage.check()


def test_an_error_comes_before_the_signal() -> None:
    @uninterrupted
    def fail() -> None:
        interrupt()
        raise ValueError("first")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert str(caught.value.__context__) == "first"


def test_handlers_of_the_program_are_called_as_ever() -> None:
    """Whatever it does when a signal comes; one that it installs later, too."""
    calls: list[tuple[str, int]] = []

    def first(number: int, frame: object) -> None:
        calls.append(("first", number))

    def second(number: int, frame: object) -> None:
        calls.append(("second", number))
        raise TimeoutError

    @uninterrupted
    def work() -> None:
        os.kill(os.getpid(), signal.SIGALRM)
        for _ in range(100):
            pass
        assert not calls

    before = signal.signal(signal.SIGALRM, first)
    try:
        work()
        assert calls == [("first", signal.SIGALRM)]
        calls.clear()
        signal.signal(signal.SIGALRM, second)
        with pytest.raises(TimeoutError):
            work()
        assert signal.getsignal(signal.SIGALRM) is second
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_second_signal_is_not_held_back() -> None:
    """The first one may be waiting for what never comes."""
    reached = []

    @uninterrupted
    def half_change() -> None:
        interrupt()
        reached.append(1)
        interrupt()
        reached.append(2)

    damage = Damage()
    with pytest.raises(KeyboardInterrupt):
        half_change()
    assert reached == [1]
    with pytest.raises(HeteroError, match=r"in the middle of half_change\(\).*last checkpoint"):
        damage.check()
    Damage().check()  # of what is made afterwards nothing is known


def test_a_wait_that_may_never_end_delivers() -> None:
    @uninterrupted
    def wait() -> None:
        interrupt()
        deliver_signals()
        raise AssertionError("not reached")

    damage = Damage()
    with pytest.raises(KeyboardInterrupt):
        wait()
    with pytest.raises(HeteroError, match=r"in the middle of wait\(\)"):
        damage.check()
    deliver_signals()  # there is none


def test_other_threads_are_let_alone() -> None:
    held: list[object] = []

    @uninterrupted
    def look() -> None:
        held.append(signal.getsignal(signal.SIGINT))
        deliver_signals()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert held == [signal.default_int_handler]


class TestContexts:
    def test_a_block_is_interrupted_at_once_and_its_end_is_not(self) -> None:
        events: list[str] = []

        @contextmanager
        def context() -> Iterator[None]:
            events.append("begin")
            try:
                yield
            finally:
                interrupt()
                events.append("end")

        with pytest.raises(KeyboardInterrupt), Uninterrupted(context()):
            events.append("block")
        with pytest.raises(KeyboardInterrupt), Uninterrupted(context()):
            interrupt()
            events.append("not reached")
        assert events == ["begin", "block", "end", "begin", "end"]

    def test_what_was_begun_is_ended(self) -> None:
        events: list[str] = []

        @contextmanager
        def context() -> Iterator[None]:
            interrupt()
            events.append("begin")
            try:
                yield
            except KeyboardInterrupt:
                events.append("interrupted")
                raise
            finally:
                events.append("end")

        with pytest.raises(KeyboardInterrupt), Uninterrupted(context()):
            events.append("not reached")
        assert events == ["begin", "interrupted", "end"]

    def test_what_could_not_begin_is_not_ended(self) -> None:
        @contextmanager
        def context() -> Iterator[None]:
            raise ValueError("no")
            yield

        with pytest.raises(ValueError, match="no"), Uninterrupted(context()):
            pass
