"""hetero/ranks/shard_server: what other ranks tell."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from hetero.ranks.shard_server import RequestKind, ShardServer, Versions
from tests.support.waiting import until


def test_what_one_rank_wants_stays_wanted_when_another_one_wants_less() -> None:
    """Each tells it once."""
    first = threading.Event()
    told = {1: [RequestKind.WANTED, RequestKind.BYE], 2: [RequestKind.WANTED, RequestKind.BYE]}

    def next_request(peer: int, header: torch.Tensor) -> None:
        kind = told[peer].pop(0)
        if peer == 1 and kind == RequestKind.BYE:
            first.set()  # what it wanted is noted
        if peer == 2:
            assert first.wait(60)
        header.copy_(torch.tensor([kind, 0, 5 if peer == 1 else 3, 0, 0]))

    peers: Any = SimpleNamespace(
        others=[1, 2],
        next_request=next_request,
        say=lambda *_: None,
        break_off=lambda: None,
        failures=SimpleNamespace(first=None, own_end=None),
        timeout_s=60.0,
    )
    unused: Any = None
    server = ShardServer(peers, unused, Versions(1), unused, unused)
    until(lambda: not any(told.values()))
    server.close()
    assert server.wanted == 5
