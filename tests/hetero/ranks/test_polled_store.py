"""hetero/ranks/start/meeting: waits that end."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from hetero.ranks.start.meeting import PolledStore
from offload.errors import PeerError


def nothing() -> None:
    pass


def within(store: PolledStore) -> dist.PrefixStore:
    """As gloo has it: in a store of C++."""
    return dist.PrefixStore("here", store)


def test_it_is_the_other_store() -> None:
    inner = dist.HashStore()
    store = PolledStore(inner, 60.0, nothing)
    gloos = within(store)
    gloos.set("key", "value")
    gloos.wait(["key"])
    assert gloos.get("key") == inner.get("here/key") == b"value"
    assert gloos.add("count", 2) == 2
    assert gloos.check(["key", "count"])
    assert not gloos.check(["another"])


def test_a_wait_ends_by_what_the_look_raises() -> None:
    inner, looks = dist.HashStore(), iter(range(3))

    def look() -> None:
        if next(looks, None) is None:
            raise PeerError("rank 1 is gone")

    store = PolledStore(inner, 60.0, look)
    for wait in (lambda: within(store).wait(["key"]), lambda: within(store).get("key")):
        with pytest.raises(PeerError, match="rank 1 is gone"):
            wait()


def test_a_wait_in_another_thread_is_ended() -> None:
    begun = threading.Event()
    store = PolledStore(dist.HashStore(), 60.0, begun.set)
    raised: list[str] = []

    def wait() -> None:
        try:
            within(store).wait(["key"])
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(60.0)
    assert not within(store).check(["key"])  # it keeps nobody from asking
    store.end()
    thread.join()
    assert "ended" in raised[0]


def test_a_wait_has_a_limit() -> None:
    store = PolledStore(dist.HashStore(), 0.05, nothing)
    with pytest.raises(RuntimeError, match="timed out"):
        within(store).wait(["key"])
    store = PolledStore(dist.HashStore(), 60.0, nothing)
    with pytest.raises(RuntimeError, match="timed out"):
        within(store).wait(["key"], timedelta(seconds=0.01))
