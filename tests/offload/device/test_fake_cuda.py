"""What the fake device finds: uses without order, memory and events that go too early."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from offload.device.device_arena import DeviceArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account
from tests.support.cuda.stream_order import HOST, StreamOrder
from tests.support.native.fake_cuda import FakeRuntime

NBYTES = 4096
NO_ORDER = "none waits for the other's event"


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(page_lockable=False, eager=False)


def nothing() -> None:
    pass


@pytest.mark.parametrize("first_writes", [False, True])
@pytest.mark.parametrize("second_writes", [False, True])
def test_two_streams_that_use_the_same_memory_need_an_event(
    runtime: FakeRuntime, first_writes: bool, second_writes: bool
) -> None:
    one, other = runtime.new_stream(), runtime.new_stream()

    def use(stream: object, writes: bool) -> None:
        runtime.give(stream, nothing, **{"writes" if writes else "reads": [(100, 50)]})  # type: ignore[arg-type]

    use(one, first_writes)
    if first_writes or second_writes:
        with pytest.raises(AssertionError, match=NO_ORDER):
            use(other, second_writes)
    runtime.wait(other, runtime.record(one))
    use(other, second_writes)


@pytest.mark.parametrize("wait", ["synchronize", "synchronize_all", "done"])
def test_what_the_host_has_waited_for_comes_first(runtime: FakeRuntime, wait: str) -> None:
    one, other = runtime.new_stream(), runtime.new_stream()
    runtime.give(one, nothing, writes=[(0, 10)])
    event = runtime.record(one)
    waits: dict[str, Callable[[], object]] = {
        "synchronize": lambda: runtime.synchronize(event),
        "synchronize_all": runtime.synchronize_all,
        "done": lambda: [runtime.step(one) for _ in range(2)] and runtime.done(event),
    }
    if wait == "done":
        assert not runtime.done(event)  # which orders nothing
        with pytest.raises(AssertionError, match=NO_ORDER):
            runtime.give(other, nothing, reads=[(9, 1)])
    waits[wait]()
    runtime.give(other, nothing, reads=[(0, 10)])


def test_order_goes_through_several_streams() -> None:
    order = StreamOrder()
    order.use("a", [(0, 8)], writes=True)
    order.after("b", order.now("a"))
    order.use("b", [(100, 8)], writes=True)
    order.after("c", order.now("b"))
    order.use("c", [(0, 8), (100, 8)], writes=True)
    order.use("d", [(8, 92)], writes=True)  # beside all of it
    with pytest.raises(AssertionError, match=NO_ORDER):
        order.use("d", [(7, 2)], writes=False)
    order.after(HOST, order.now("c"))
    order.use("e", [(0, 8), (100, 8)], writes=True)


def test_an_event_is_a_point_and_not_the_stream(runtime: FakeRuntime) -> None:
    one, other = runtime.new_stream(), runtime.new_stream()
    event = runtime.record(one)
    runtime.give(one, nothing, writes=[(0, 10)])
    runtime.wait(other, event)
    with pytest.raises(AssertionError, match=NO_ORDER):
        runtime.give(other, nothing, reads=[(0, 10)])


def test_copies_are_uses_of_both_sides(runtime: FakeRuntime) -> None:
    one, other = runtime.new_stream(), runtime.new_stream()
    there, ram, more = (torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(3))
    runtime.copy(there, ram, one)
    with pytest.raises(AssertionError, match=NO_ORDER):
        runtime.copy(more, there, other)
    runtime.wait(other, runtime.record(one))
    runtime.copy(more, there, other)
    with pytest.raises(AssertionError, match=NO_ORDER):
        runtime.copy(there, ram, one)
    runtime.synchronize_all()


def test_a_copy_keeps_no_memory(runtime: FakeRuntime) -> None:
    there, ram = (torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(2))
    stream = runtime.new_stream()
    runtime.copy(there, ram, stream)
    del ram
    gc.collect()
    with pytest.raises(AssertionError, match="memory is gone before it is done"):
        runtime.synchronize_all()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_memory_is_freed_behind_a_copy_that_uses_it(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    found: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda e: found.append(str(e.exc_value)))
    arena = DeviceArena(runtime, 1, NBYTES, Ledger({}), Account.GATHERED)  # type: ignore[arg-type]
    view, ram = arena.view(0, 1, torch.uint8), torch.zeros(NBYTES, dtype=torch.uint8)
    runtime.copy(view, ram, runtime.new_stream())
    if not waits:
        monkeypatch.setattr(runtime, "wait", lambda stream, event: None)
    arena.close()
    del view
    gc.collect()
    assert [NO_ORDER in words for words in found] == [] if waits else [True]
    assert runtime.copying  # which the host did not wait for
