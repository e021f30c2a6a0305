"""Buckets: the memory in which whole gradients wait until they are averaged over the ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from hetero.state.managed_param import ManagedParam
from offload.memory.arena import HostArena
from offload.memory.slot_pool import SlotPool


@dataclass(frozen=True)
class ReduceBuffers:
    """Memory in which gradients are while they become means; all of it in `dtype`.

    Attributes:
        dtype: of gradients on their way between ranks.
        buckets: slots for buckets, in stages 2 and 3; None in stage 1, where GRAD homes are whole,
            and are the buckets.
        received: slots for what other ranks of the shard group send, one whole chunk at a time.
        replicas: slots for what other replicas of this shard send; None without replicas.
        by_backend: the backend's reduce-scatter makes the sums (Config.grad_reduce).
    """

    dtype: torch.dtype
    buckets: SlotPool | None
    received: SlotPool
    replicas: HostArena | None
    by_backend: bool = False


class BucketState(enum.Enum):
    """What a bucket's memory holds, and who may touch it."""

    FILLING = "this rank's gradients, which autograd adds"
    SENDING = "this rank's gradients, which messages to other ranks read"
    MEAN = "in this rank's shard of it the mean over the ranks, elsewhere nothing (stage 1)"


@dataclass
class Bucket:
    """A chunk's gradient as this rank computed it, flat, the whole chunk."""

    flat: torch.Tensor
    slot: int | None  # of the pool; None: the bucket is the chunk's GRAD home
    state: BucketState = BucketState.FILLING
    filled: set[ManagedParam] = field(default_factory=set)  # their gradients are in it
