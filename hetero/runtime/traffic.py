"""What was moved, and what took time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.activations.store import ActivationStore
from hetero.chunk_groups.chunk_group import ChunkGroup
from offload.device.backend import Backend


@dataclass(frozen=True)
class Traffic:
    """Bytes moved since the engine was made; disks' being measured does not count."""

    h2d: int
    d2h: int
    disk_read: int
    disk_write: int
    sent: int = 0  # to other ranks: shards of parameters, and of gradients to be averaged
    received: int = 0
    # Of what saved tensors are in, whole pages of the disk; h2d, d2h, disk_read and disk_write
    # have these bytes, too.
    activations_h2d: int = 0
    activations_d2h: int = 0
    activations_read: int = 0
    activations_written: int = 0


def traffic_of(
    chunk_groups: Sequence[ChunkGroup], backend: Backend, activations: ActivationStore | None
) -> Traffic:
    """Of all chunk groups, which compute on `backend`, and of what autograd saved."""
    read = written = 0
    for disk in (chunk_group.disk for chunk_group in chunk_groups):
        if disk is not None:
            now, before = disk.io.stats, disk.measuring
            read += now["read_bytes"] - before["read_bytes"]
            written += now["written_bytes"] - before["written_bytes"]
    groups = [peers for chunk_group in chunk_groups for peers in chunk_group.world.groups()]
    sent = sum(peers.sent_bytes for peers in groups)
    received = sum(peers.received_bytes for peers in groups)
    of_activations = (0, 0, 0, 0)
    if activations is not None:
        of_activations = activations.moved_bytes
        own_read, own_written = activations.own_io_bytes
        read, written = read + own_read, written + own_written
    moved = backend.h2d_bytes, backend.d2h_bytes, read, written, sent, received
    return Traffic(*moved, *of_activations)


@dataclass(frozen=True)
class Seconds:
    """Seconds since the engine was made.

    Attributes:
        gather_wait_s: compute waited for chunks from other ranks: what prefetch did not hide.
        update_s: updates were being made, by the pipelines that exist now.
        update_wait_s: step(), or a use of a parameter, waited for updates.
    """

    gather_wait_s: float
    update_s: float
    update_wait_s: float


def seconds_of(chunk_groups: Sequence[ChunkGroup]) -> Seconds:
    """Of all chunk groups."""
    ranks = (each.ranks for each in chunk_groups if each.ranks is not None)
    return Seconds(
        sum(each.gathering.wait_s for each in ranks if each.gathering is not None),
        sum(float(each.pipeline.stats["busy_s"]) for each in chunk_groups),
        sum(each.update_wait_s for each in chunk_groups),
    )
