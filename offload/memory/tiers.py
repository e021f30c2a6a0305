"""The vocabulary: tiers, kinds of state and the words everybody else uses.

tier      DEVICE (where compute happens), HOST (RAM), DISK (a file on NVMe). With the CPU as the
compute device DEVICE and HOST are the same memory, and all of it is accounted as HOST. arena
one exactly sized allocation of a tier, cut into equal slots; the only source of model-state memory.
chunk     the unit of placement: an ordered list of parameters packed into one capacity. A tensor is
not split over chunks; one that is larger than a slot gets a chunk of several. shard     this rank's
n-th of a chunk, when n ranks share it; with one rank the whole chunk. tile     the part of a shard
that lies in one slot: the unit of the optimizer's reads and writes. kind of state   PARAM (compute
dtype), GRAD, OPTIM_STATE (optimizer state: what completes the parameter to an fp32 master, exp_avg,
exp_avg_sq). home      the tier where a kind of state's authoritative copy lives between steps.
gathered  a clean copy of a PARAM kind of state, whole, in a slot while compute needs it: of what is
on DISK or in the shards of all ranks; dropped, never written back. bucket    the gradient of a
whole chunk as this rank computed it, until it is averaged over the ranks and becomes a shard of
GRAD. pin     a live tensor over a slot. A slot is reused only when its pins are gone. ledger
bytes in use per tier and account; the budgets are enforced by it.
"""

from __future__ import annotations

import enum


class Tier(enum.Enum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Account(enum.Enum):
    """What managed bytes are used for; the ledger is kept per tier and account."""

    PARAM = "param"  # homes
    GRAD = "grad"
    OPTIM_STATE = "optim_state"
    GATHERED = "gathered"  # slots for gathered copies
    SHARD = "shard"  # slots for DISK-homed shards of parameters, on their way to ranks
    BUCKET = "bucket"  # whole gradients, of this rank and from others, while they are averaged
    GRAD_SLOT = "grad_slot"  # slots for DISK-homed gradients on their way
    BUFFER = "buffer"  # the optimizer pipeline's buffers
    LINK = "link"  # buffers for what is on its way between DEVICE and RAM
    FILE = "file"  # the file of all DISK homes
    INIT = "init"  # parameters under construction, in their construction dtype


class StateKind(enum.Enum):
    """The kinds of state of a chunk, each with a home; the values are Placement's field names."""

    PARAM = "param"
    GRAD = "grad"
    OPTIM_STATE = "optim_state"
