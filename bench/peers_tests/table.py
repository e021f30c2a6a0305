"""The projects whose tests can be run."""

from __future__ import annotations

from collections.abc import Mapping

from bench.peers_tests import accelerate, colossalai, deepspeed, pytorch, transformers
from bench.peers_tests.peer import Peer

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        *(deepspeed.PEER, colossalai.PEER, accelerate.PEER),
        *(transformers.PEER, pytorch.PEER),
    )
}
